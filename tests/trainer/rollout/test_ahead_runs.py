"""Complete runs whose batches are generated ahead, in a pool of its own: the numbers of a loop without threads, and resumed."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import trainer.rollout.remote_rollout as remote_rollout
from tests.runs import make_task, repeatable, run_ppo
from trainer.ppo.loop import Loop
from trainer.rollout.ahead import RolloutsAhead
from trainer.rollout.partial import TokenCounts

AHEAD = (
    "algorithm=grpo", "placement=split", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "data.train_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.n=2", "data.max_response_length=24",
    "trainer.total_training_steps=5", "trainer.save_freq=1",
)  # fmt: skip
MODES = {
    "one step off": ("async_training.mode=one_step_off",),
    "staleness 2": ("async_training.mode=async", "async_training.max_staleness=2"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=16, sft_size=8)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


def reference_fit(loop: Loop) -> None:
    """The loop without a thread: what is generated ahead is generated before the update, one after the other."""
    loop.begin()
    trainer, policy = loop.trainer, loop.sampler.policy
    assert isinstance(policy, RolloutsAhead)
    for step in trainer.steps():
        with trainer.phases("step"):
            batch = loop.next_batch(step)
            assert batch is not None
            if step == trainer.total_steps:
                policy.release()
            else:
                counts = TokenCounts()
                for _ in policy.generate(loop.sampler, step + 1, loop.prompts, counts):
                    pass
                trainer.metrics["rollout/recomputed_tokens"] = float(counts.recomputed)
            batch |= loop.log_probs_and_values(batch)
            batch |= loop.correction(batch)
            batch |= loop.advantages(batch)
            batch |= loop.loss_mask(batch)
            loop.response_log.record(step, batch, loop.actor)
            loop.update(step, batch)
            if loop.syncs(step):
                loop.sync_weights(step)
        loop.after(step, batch)


@pytest.mark.parametrize("mode", MODES)
def test_run_has_the_numbers_of_a_sequential_loop_and_resumes_bitwise(
    mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(name: str) -> tuple[str, ...]:
        return (*AHEAD, *MODES[mode], f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *options("whole"))
    staleness = [step["rollout/staleness/max"] for step in whole]
    assert staleness[:2] == [0, 1] and max(staleness) == (1 if mode == "one step off" else 2)
    groups = []
    for step in range(1, 6):
        dump = load_file(tmp_path / "whole" / "rollouts" / f"step_{step}.safetensors")
        versions = dump["tokens.weight_version"][dump["tokens.response_mask"].bool()]
        assert step - 1 - int(versions.min()) == staleness[step - 1]
        assert mode != "one step off" or versions.unique().tolist() == [max(0, step - 2)]
        groups += dump["rows.group"].unique().tolist()
    assert len(set(groups)) == len(groups) == 20, "every prompt is trained on once"
    assert mode != "one step off" or sorted(groups) == list(range(20))

    monkeypatch.setattr(Loop, "fit", reference_fit)
    assert repeatable(run_ppo(task, tmp_path / "sequential", *options("sequential"))) == repeatable(whole)
    monkeypatch.undo()
    monkeypatch.setattr(remote_rollout, "STEPS", 4)
    # The batch of step 4 is in the checkpoint: the weights that sampled it are gone.
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_3'}")
    assert repeatable(run_ppo(task, tmp_path / "resumed", *options("resumed"), *path)) == repeatable(whole[3:])


@pytest.mark.parametrize("flight", [("keep", "keep"), ("finish", "recompute")])
def test_weights_that_are_synced_every_second_step_while_requests_run(
    flight: tuple[str, str], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs after steps 2, 3 (checkpoint), 4 and 6: a resumed run continues between two syncs."""

    def options(name: str) -> tuple[str, ...]:
        dumps = f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}"
        settings = ("mode=async", "max_staleness=4", "trigger_parameter_sync_step=2", "oversubmit=3")
        settings += (f"pause={flight[0]}", f"kv_cache={flight[1]}")
        steps = ("trainer.total_training_steps=6", "trainer.save_freq=3")
        return (*AHEAD, *(f"async_training.{setting}" for setting in settings), *steps, dumps)

    whole = run_ppo(task, tmp_path / "whole", *options("whole"))
    assert max(step["rollout/staleness/max"] for step in whole) <= 4
    assert [int(step["training/global_step"]) for step in whole if "timing_s/sync" in step] == [2, 3, 4, 6]
    assert [step["training/global_step"] for step in whole if step["timing_s/trainer_stall"] > 0] == [1, 2, 3, 4, 5, 6]
    mixed = 0
    for step in range(1, 7):
        dump = load_file(tmp_path / "whole" / "rollouts" / f"step_{step}.safetensors")
        lengths, mask = dump["lengths"].tolist(), dump["tokens.response_mask"].bool()
        columns = zip(dump["tokens.weight_version"].split(lengths), mask.split(lengths), strict=True)
        versions = [{*row[trained].tolist()} for row, trained in columns]
        assert {0, 2, 3, 4} >= set().union(*versions)
        mixed += sum(len(of_row) > 1 for of_row in versions)
    assert (mixed > 0) == (flight[0] == "keep")

    if flight[0] == "keep":
        monkeypatch.setattr(Loop, "fit", reference_fit)
        assert repeatable(run_ppo(task, tmp_path / "sequential", *options("sequential"))) == repeatable(whole)
        monkeypatch.undo()
        monkeypatch.setattr(remote_rollout, "STEPS", 4)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_3'}")
    resumed = run_ppo(task, tmp_path / "resumed", *options("resumed"), *path)
    # Each sync verifies other lines than the one before it: which ones depends on the number of syncs of a process.
    for step in (*whole, *resumed):
        step.pop("rollout/verified_bytes", None)
    assert repeatable(resumed) == repeatable(whole[3:])
