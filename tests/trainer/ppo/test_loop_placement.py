"""Complete runs in every layout: the same numbers as on one pool, and pools that work concurrently."""

import json
from pathlib import Path

import pytest

from tests.faults import loss_that
from tests.reward_models import make_reward_model
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.test_main_ppo_runs import survivors
from trainer import main_ppo
from trainer.run.run_dir import read_lines
from trainer.tracking.batch_file import load_batch

Spans = dict[str, tuple[list[str], float, float]]
# A critic, a reference, and two updates of actor and critic per step.
ALL_ROLES = (
    "algorithm=ppo", "algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "critic.model.enable_gradient_checkpointing=false",
)  # fmt: skip
SHARED = "{nodes: 1, gpus: 1, fraction: 0.5}"
LAYOUTS = {
    "colocate_pairs": ["placement=colocate_pairs", "trainer.n_gpus_per_node=2"],
    "split": ["placement=split", "trainer.n_gpus_per_node=4"],
    "fractions of one GPU": [
        "placement=custom", f"placement.pools.train={SHARED}", f"placement.pools.value={SHARED}",
        "placement.roles.actor=train", "placement.roles.critic=value", "actor_rollout_ref.rollout.free_cache_engine=false",
    ],
}  # fmt: skip
UNEVEN = [
    "placement=custom", "trainer.n_gpus_per_node=4", "placement.pools.train={nodes: 1, gpus: 2, fraction: 1.0}",
    *(f"placement.pools.{name}={{nodes: 1, gpus: 1, fraction: 1.0}}" for name in ("value", "engines")),
    "placement.roles.actor=train", "placement.roles.critic=value", "placement.roles.rollout=engines",
]  # fmt: skip
DEPENDS_ON_THE_CUT = ("timing", "perf/", "rollout/verified")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def colocated(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """On one worker, in this process."""
    folder = tmp_path_factory.mktemp("colocated")
    return run_ppo(task, folder / "run", *ALL_ROLES, loss_that(folder, "pass"))


def spans_of(run_dir: Path) -> list[Spans]:
    """For each step: the pools, start and end of each phase."""
    entries = read_lines(run_dir / "timeline.jsonl")
    return [{phase: (pools, start, end) for phase, pools, start, end in entry["spans"]} for entry in entries]


def intersect(spans: Spans, one: str, other: str) -> bool:
    return max(spans[one][1], spans[other][1]) < min(spans[one][2], spans[other][2])


def assert_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """Except metrics that depend on the layout: an engine on its own GPUs never sleeps, and has no timings of sleep and wake."""
    for mine, expected in zip(found, wanted, strict=True):
        names = [name for name in expected if not name.startswith(DEPENDS_ON_THE_CUT)]
        assert sorted(names) == sorted(name for name in mine if not name.startswith(DEPENDS_ON_THE_CUT))
        for name in names:
            assert mine[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["split", "colocate_pairs", "fractions of one GPU"])
def test_layouts_give_the_same_numbers(layout: str, task: Path, tmp_path: Path, colocated: list[dict[str, float]]) -> None:
    """Critic and actor learn at the same time, as the timeline shows."""
    slow = loss_that(tmp_path, "time.sleep(0.3)")
    run_dir = tmp_path / "run"
    assert_same(run_ppo(task, run_dir, *ALL_ROLES, slow, "trainer.backend=ray", *LAYOUTS[layout]), colocated)
    for spans in spans_of(run_dir):
        pools = {phase: output[0] for phase, output in spans.items()}
        assert pools["values"] == pools["update_critic"] != pools["update_actor"] == pools["old_log_prob"] and pools["adv"] == []
        assert (pools["gen"] == pools["update_actor"]) == (layout != "split")
        assert intersect(spans, "update_actor", "update_critic") and not intersect(spans, "gen", "update_actor")
    assert survivors(str(run_dir)) == []


@pytest.mark.soak
def test_phases_on_one_pool_do_not_overlap(task: Path, tmp_path: Path, colocated: list[dict[str, float]]) -> None:
    """The timeline of each step is truncated like other files when a run resumes from a checkpoint, also in another
    layout."""
    run_dir = tmp_path / "run"
    words = (*ALL_ROLES, loss_that(tmp_path, "pass"), "trainer.save_freq=1")
    of_saves = {"timing_s/save_checkpoint", "perf/checkpoint_write_s", "perf/checkpoint_gb", "perf/checkpoint_gb_per_s"}
    assert run_ppo(task, run_dir, *words)[1].keys() - of_saves == colocated[1].keys()
    whole = spans_of(run_dir)
    order = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "sync", "step"]
    assert [list(spans) for spans in whole] == [[*order, "save_checkpoint"]] * 2
    assert not any(intersect(spans, one, other) for spans in whole for one in order[:-1] for other in order[:-1] if one != other)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    run_ppo(task, run_dir, *words)
    again = spans_of(run_dir)
    assert again[0] == whole[0] and len(again) == 2 and again[1]["gen"][1] > whole[1]["step"][2]


@pytest.mark.soak
def test_uneven_pools_resume_bitwise_and_in_another_layout(task: Path, tmp_path: Path, colocated: list[dict[str, float]]) -> None:
    """The actor on two slots, critic and engine on one each; resumed with the same layout (bitwise identical), and in one
    process."""
    run_dir, words = tmp_path / "run", (*ALL_ROLES, loss_that(tmp_path, "pass"))
    uneven = ("trainer.backend=ray", *UNEVEN, "trainer.save_freq=1")
    whole = run_ppo(task, run_dir, *words, *uneven)
    assert_same(whole, colocated)
    assert json.loads((run_dir / "global_step_1/manifest.json").read_text())["world_size"] == 4
    begin = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir}/global_step_1")
    assert repeatable(run_ppo(task, tmp_path / "again", *words, *uneven, *begin)) == repeatable(whole[1:])
    assert_same(run_ppo(task, tmp_path / "resumed", *words, *begin), colocated[1:])


@pytest.mark.soak
def test_failure_of_one_pool_ends_the_others(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The actor's loss fails while the critic has thousands of updates before it."""
    fault = loss_that(tmp_path, "raise RuntimeError('broken loss')")
    words = ("trainer.backend=ray", *LAYOUTS["colocate_pairs"], "critic.ppo_epochs=5000")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *ALL_ROLES, fault, *words)) == 1
    assert "rank 0 failed in update of actor: RuntimeError: broken loss" in capsys.readouterr().err
    assert metrics_of(tmp_path / "run") == [] and survivors(str(tmp_path / "run")) == []


@pytest.mark.parametrize("estimator", ["gae", pytest.param("remax", marks=pytest.mark.soak)])
def test_reward_models_score_concurrently_with_log_probs(task: Path, tmp_path: Path, estimator: str) -> None:
    """Unless responses are selected by their scores. The dump of a step equals that on one pool."""
    make_reward_model(tmp_path / "reward", seed=1)
    words = (
        *ALL_ROLES, f"algorithm.adv_estimator={estimator}", f"reward.models.a={{path: {tmp_path}/reward}}",
        "reward.weight=0.5", "trainer.total_training_steps=1", "critic.enable=true", f"trainer.rollout_data_dir={tmp_path}/dumps",
    )  # fmt: skip
    alone = run_ppo(task, tmp_path / "alone", *words)
    (kept, _) = load_batch(tmp_path / "dumps/step_1.safetensors")
    run_dir = tmp_path / "run"
    assert_same(run_ppo(task, run_dir, *words, "trainer.backend=ray", *LAYOUTS["colocate_pairs"]), alone)
    (again, _) = load_batch(tmp_path / "dumps/step_1.safetensors")
    assert (again.tokens.keys(), again.rows.keys()) == (kept.tokens.keys(), kept.rows.keys())
    (spans,) = spans_of(run_dir)
    assert spans["reward_model"][0] == spans["values"][0] == ["critic"] and spans["old_log_prob"][0] == ["actor"]
    early = spans["old_log_prob"][1] < spans["reward_model"][2]
    assert early == (estimator == "gae")
    assert spans["values"][1] >= spans["reward_model"][2], "in sequence, in the same pool"
