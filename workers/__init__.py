"""Code that runs in worker processes: training engines, rollout engines, roles. Never imports trainer."""
