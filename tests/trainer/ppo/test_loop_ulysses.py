"""The complete loop with the tokens of each row split over two ranks."""

from pathlib import Path

import pytest

from tests.runs import make_task, repeatable, run_ppo

PPO = ("algorithm=ppo", "algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
ULYSSES = (
    "trainer.backend=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    "critic.fsdp_config.ulysses_sequence_parallel_size=2",
)  # fmt: skip


@pytest.mark.soak
def test_two_sequence_parallel_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Actor, critic and reference. Shared work counts once: tokens and FLOPs equal those of one rank."""
    task, alone = (
        make_task(tmp_path),
        "actor_rollout_ref.rollout.n=1",
    )  # one rank would share the prompt of a group, and compute less
    one, two = (run_ppo(task, tmp_path / name, *PPO, alone, *cut) for name, cut in {"one": (), "two": ULYSSES}.items())
    assert all(one[1][name] for name in ("actor/grad_norm", "critic/grad_norm", "actor/reward_kl_penalty"))
    for mine, expected in zip(repeatable(two), repeatable(one), strict=True):
        left_out = {"rollout/verified_bytes": expected["rollout/verified_bytes"]}  # it depends on what is gathered for a sync
        assert mine | left_out == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for mine, expected in zip(two, one, strict=True):
        assert mine["perf/total_num_tokens"] == expected["perf/total_num_tokens"]
        assert mine["perf/mfu"] * mine["perf/time_per_step"] * 2 == pytest.approx(
            expected["perf/mfu"] * expected["perf/time_per_step"]
        )
        tokens = mine["perf/total_num_tokens"] / mine["perf/time_per_step"]
        assert mine["perf/throughput"] == pytest.approx(tokens / 2)
