#!/usr/bin/env bash
# A tiny model learns to search for what it cannot know: environment, data and a corpus, a warm start, then training with GRPO on CPU.
# Run again, it trains again, in a new run directory, without the set-up. Arguments go to trainer.main_ppo:
#     scripts/search_local.sh actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent    # without the tool, for comparison
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/tool_recipe.sh" search_local "$@"
