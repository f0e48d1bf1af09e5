"""Rename and select batch columns for the next phase of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from workers.batch import Batch

COMPUTED_COLUMNS = (
    "old_log_probs", "old_all_log_probs", "sum_pi_squared", "ref_log_probs", "ref_all_log_probs", "values", "last_value",
    "staleness",
)  # fmt: skip
"""Columns computed by forward passes over the responses; absent from a batch as it was generated and scored."""


def renamed(batch: Batch, **names: str) -> Batch:
    """Token columns of ``batch``, renamed by ``names`` (old=new). Row columns are dropped."""
    return Batch(batch.lengths, tokens={names.get(name, name): column for name, column in batch.tokens.items()})


def advantage_inputs(batch: Batch, rewards: Tensor, config: AlgorithmConfig) -> AdvantageInputs:
    """Inputs of the advantage estimator. rewards (T,): token rewards after the KL penalty, if any.

    Raises ValueError if algorithm.gdpo_reward_keys names a reward that is missing for a response.
    """
    tokens, rows = batch.tokens, batch.rows
    bootstraps = config.truncated_answers == "bootstrap"
    return AdvantageInputs(
        token_rewards=rewards,
        response_mask=tokens["response_mask"],
        lengths=batch.lengths,
        uid=rows["group"],
        values=tokens.get("values"),
        # A terminated response has no future; only a truncated one is bootstrapped with the critic's value.
        last_value=torch.where(rows["finished"].bool(), 0.0, rows["last_value"]) if bootstraps else None,
        baselines=rows.get("baseline"),
        rewards=named_rewards(
            batch.objects["reward_extra"],
            config.gdpo_reward_keys or (),
            needed="rewards" in ADVANTAGES.needs(config.adv_estimator),
        ),
        old_log_probs=tokens.get("old_log_probs"),
        sum_pi_squared=tokens.get("sum_pi_squared"),
        is_weights=tokens.get("is_weights"),
    )


def named_rewards(extras: Sequence[Mapping[str, float]], names: Sequence[str], *, needed: bool = True) -> dict[str, Tensor]:
    """Reward components by name, float32 (B,) each. extras: numbers that the reward function returned, one dict per response.

    needed: by the estimator; raises ValueError if a component is missing for any response. Otherwise it is left out.
    """
    if not needed:
        names = [name for name in names if all(name in extra for extra in extras)]
    for name in names:
        silent = next((extra for extra in extras if name not in extra), None)
        if silent is not None:
            names_found = ", ".join(silent) or "nothing"
            raise ValueError(
                f"algorithm.gdpo_reward_keys: the reward function reports no {name} for a response; it reports {names_found}"
            )
    return {name: torch.tensor([extra[name] for extra in extras], dtype=torch.float32) for name in names}


def sampled_columns(batch: Batch) -> Batch:
    """The batch as it was generated and scored, without the columns of forward passes."""
    # Overlapped scoring adds those columns before the batch is dumped; a replay computes them again.
    tokens = {name: column for name, column in batch.tokens.items() if name not in COMPUTED_COLUMNS}
    return replace(
        batch, tokens=tokens, rows={name: column for name, column in batch.rows.items() if name not in COMPUTED_COLUMNS}
    )
