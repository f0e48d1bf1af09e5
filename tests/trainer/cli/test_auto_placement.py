"""placement=auto: the chosen plan, typed keys, the plan of a resumed run, predicted against measured times."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.placement import PlacementConfig, PoolConfig, place
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from scripts.bench.shapes import SHAPES
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable
from trainer import main_ppo
from trainer.cli import auto_placement
from trainer.cli.auto_placement import PlanError, best_plan, cluster_of, planned, stored_settings, with_pools
from trainer.planner.memory_model import Shape
from trainer.planner.search import SETTINGS, RankedPlan, rollout_options, train_options
from trainer.planner.time_model import ResponseLengths
from trainer.run.run_dir import leaves, write_config

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with H100s, and a model of 7B."""
    monkeypatch.setattr("trainer.tracking.metrics.gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    shape = Shape.of(SHAPES["7b"])
    names = (ACTOR, "actor_rollout_ref.ref")
    monkeypatch.setattr(auto_placement, "model_shapes", lambda config: dict.fromkeys(names, shape))
    monkeypatch.setattr("trainer.ppo.ppo_builder.check_splits", lambda config: None)  # there is no model


def config_of(folder: Path, *words: str) -> PPOConfig:
    return compose(
        "ppo_trainer",
        PPOConfig,
        [
            "algorithm=grpo", "rollout=vllm", "placement=auto", "data.train_batch_size=64", f"{ROLLOUT}.n=8",
            "data.max_prompt_length=512", f"{ACTOR}.ppo_mini_batch_size=64", "data.max_response_length=1024",
            "data.train_files=[a.parquet]", "data.val_files=[a.parquet]", "trainer.n_gpus_per_node=4",
            f"{ROLLOUT}.tensor_model_parallel_size=1", f"trainer.default_local_dir={folder}", *words,
        ],
    )  # fmt: skip


def auto(task: Path, run_dir: Path, *words: str) -> list[str]:
    """A command line for two workers."""
    two = ("placement=auto", "trainer.n_gpus_per_node=2", "trainer.backend=ray", "algorithm=grpo", "trainer.save_freq=3")
    return ppo_arguments(task, run_dir, *two, "trainer.total_training_steps=6", *words)


def test_the_plan_is_never_slower_than_what_is_given_and_keeps_all_gpus(h100: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    best = best_plan(config, frozenset())
    given_plan = RankedPlan(
        replace(config, placement=replace(config.placement, layout="colocate_all")),
        best.cluster, best.shapes, best.lengths, {},
    )  # fmt: skip
    assert best.overrides and best.fits and best.seconds < given_plan.seconds
    assert best.lengths.response == best.lengths.most == 1024
    found, (note,) = planned(config, frozenset())
    assert note.startswith(f"placement=auto: {best.seconds:.3g} s a step predicted on 1 x 4 h100; sets ")
    assert all(f"{key}=" in note for key in best.overrides)
    assert (found.trainer.nnodes, found.trainer.n_gpus_per_node) == (1, 4)
    assert found.placement.layout == "auto" and found.placement.pools
    assert planned(found, frozenset()) == (found, []), "a plan is made once"
    again = RankedPlan(found, best.cluster, best.shapes, best.lengths, {})
    assert again.seconds == pytest.approx(best.seconds) and again.fits


@pytest.mark.parametrize(
    "typed",
    [
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 5000},
        {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ACTOR}.fsdp_config.param_offload": True},
        {f"{ROLLOUT}.gpu_memory_utilization": 0.45, "actor_rollout_ref.model.enable_gradient_checkpointing": True},
    ],
)
def test_typed_keys_stay_as_they_are(typed: dict[str, Any], h100: None, tmp_path: Path) -> None:
    words = [f"{key}={str(value).lower()}" for key, value in typed.items()]
    found, (note,) = planned(config_of(tmp_path, *words), typed.keys())
    values = leaves(asdict(found))
    assert {key: values[key] for key in typed} == typed and not any(f"{key}=" in note for key in typed)
    # The plan without them has other values: they are what the search would have changed.
    free = leaves(asdict(planned(config_of(tmp_path, *words), ())[0]))
    assert any(free[key] != value for key, value in typed.items())


def test_pools_that_are_typed_are_refused(h100: None, tmp_path: Path) -> None:
    pool = "placement.pools.a"
    with pytest.raises(ConfigError, match=r"placement\.pools\.a: placement\.layout=auto chooses the pools itself"):
        planned(config_of(tmp_path, f"{pool}={{nodes: 1, gpus: 4, fraction: 1.0}}"), {pool})


def test_every_setting_of_the_search_is_restored_on_a_resume(h100: None, tmp_path: Path) -> None:
    for strategy in ("fsdp", "megatron"):
        words = [f"{ACTOR}.strategy={strategy}", "actor_rollout_ref.ref.strategy=megatron"][: 1 + (strategy == "megatron")]
        config = config_of(tmp_path, *words)
        best = best_plan(config, frozenset())
        keys = {key for options in (*rollout_options(best), *train_options(best)) for key in options}
        assert keys and all(key.endswith(SETTINGS) for key in keys)


@given(nodes=st.integers(1, 4), gpus=st.integers(1, 8), layout=st.sampled_from(["colocate_all", "split", "colocate_pairs"]))
def test_pools_that_are_written_out_are_those_of_the_layout(nodes: int, gpus: int, layout: Any) -> None:
    config = compose("ppo_trainer", PPOConfig, [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}", "algorithm=ppo"])
    roles = ("actor", "ref", "critic", "rollout")
    try:
        wanted = place(replace(config.placement, layout=layout), config.trainer, roles)
    except ConfigError:
        return
    written = with_pools(config, wanted).placement
    found = place(written, config.trainer, roles)
    assert [(pool.name, pool.roles, pool.slots) for pool in found.pools] == [
        (pool.name, pool.roles, pool.slots) for pool in wanted.pools
    ]


def test_unknown_gpus_and_models_that_do_not_fit_are_one_line(
    h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dict.fromkeys((ACTOR, "actor_rollout_ref.ref"), Shape.of(SHAPES["72b"]))
    monkeypatch.setattr(auto_placement, "model_shapes", lambda config: shape)
    with pytest.raises(ConfigError, match=r"no plan fits 95% of 85 GB; one pool with the other settings as given takes \d+ GB"):
        planned(config_of(tmp_path, "trainer.n_gpus_per_node=1"), ())
    for names, word in ((["Quadro P2000"], "Quadro P2000"), ([], "none found")):
        monkeypatch.setattr("trainer.tracking.metrics.gpu_names", lambda names=names: names)
        with pytest.raises(ConfigError, match=rf"GPU \({word}\) are not known; known: a100, b200"):
            planned(config_of(tmp_path), ())


def test_a_smaller_variant_of_a_gpu_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.metrics.gpu_names", lambda: ["NVIDIA A100-SXM4-40GB"])
    assert cluster_of(config_of(tmp_path)).hardware.memory == pytest.approx(42.5e9, rel=0.01)
    monkeypatch.setattr("trainer.tracking.metrics.gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    assert cluster_of(config_of(tmp_path)).hardware.memory == pytest.approx(85e9, rel=0.01)


def test_no_gpu_is_left_idle_where_fewer_would_be_faster(h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(config_of(tmp_path))
    slow = replace(cluster, hardware=replace(cluster.hardware, link=1e6, memory=1e12))
    monkeypatch.setattr(auto_placement, "cluster_of", lambda config: slow)
    assert planned(config_of(tmp_path), ())[0].trainer.n_gpus_per_node == 4


def test_lengths_are_those_of_an_earlier_run_in_the_directory(h100: None, tmp_path: Path) -> None:
    line = {"training/global_step": 1, "prompt_length/mean": 100.0, "response_length/mean": 300.0, "response_length/max": 900.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert best_plan(config_of(tmp_path), ()).lengths == ResponseLengths(100.0, 300.0, 900)


def test_a_run_without_a_checkpoint_keeps_its_plan_unless_it_is_another_run(h100: None, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    found, _ = planned(config, ())
    write_config(tmp_path, asdict(found))
    assert stored_settings(config, ()) == found
    other = replace(config, data=replace(config.data, train_batch_size=128))
    assert stored_settings(other, ()) is None
    assert stored_settings(config_of(tmp_path, "trainer.n_gpus_per_node=8"), ()) is None
    assert stored_settings(config_of(tmp_path, "trainer.resume_mode=disable"), ()) is None


def test_a_model_that_is_no_dense_decoder_is_refused(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.planner.dry_run.shape_of", lambda config, parameters: None)
    config = compose("ppo_trainer", PPOConfig, auto(task, tmp_path))
    with pytest.raises(
        ConfigError, match=r"the planner covers dense decoders, and the model of actor_rollout_ref\.actor is none"
    ):
        planned(config, ())


def test_a_planned_run_passes_the_dry_run_logs_its_error_and_is_resumed_with_the_same_plan(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    assert main_ppo.PROGRAM([*auto(task, run_dir), "trainer.dry_run=full"]) == 0
    assert "fine, no training was started" in capfd.readouterr().out
    assert main_ppo.PROGRAM(auto(task, run_dir)) == 0
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: plan: ")]
    steps = metrics_of(run_dir)
    assert [step["training/global_step"] for step in steps if "plan/error" in step] == [5] and len(steps) == 6
    assert -1 < steps[4]["plan/error"] < 10 and f"({steps[4]['plan/error']:+.0%}); largest error: timing_s/" in note
    assert "scripts/bench/calibrate.py" in note

    shutil.copytree(run_dir, copy)
    (copy / "latest_checkpointed_iteration.txt").write_text("3")
    monkeypatch.setattr(auto_placement, "best_plan", lambda *_: pytest.fail("a resumed run is not planned"))
    assert main_ppo.PROGRAM(auto(task, copy)) == 0
    assert "placement=auto: the settings of the run that is resumed" in capfd.readouterr().err
    plain = [[{key: value for key, value in step.items() if key != "plan/error"} for step in repeatable(of)] for of in
             (steps, metrics_of(copy))]  # fmt: skip
    assert plain[0] == plain[1]


def test_the_largest_error_names_the_rates_that_decide_the_phase(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, _ = planned(compose("ppo_trainer", PPOConfig, auto(task, tmp_path)), ())
    compared = PlanError(config)
    step = {"timing_s/step": 30.0, "timing_s/gen": 29.0, "timing_s/update_actor": 0.02, "timing_s/sync": 0.01}
    step |= {"prompt_length/mean": 7.0, "response_length/mean": 5.0, "response_length/max": 8.0}
    found = [compared(n, step | {"timing_s/step": 10.0 * n if n > 1 else 1e6}) for n in range(1, 8)]
    assert [bool(metrics) for metrics in found] == [False, False, False, False, True, False, False]
    assert -1 < found[4]["plan/error"] < -0.9
    note = capfd.readouterr().err
    assert "note: plan: a step took 35 s, " in note and "largest error: timing_s/gen 29 s, " in note
    assert "measure decode, decode_row and decode_layer of configs/hardware/cpu.yaml" in note


def test_an_unplanned_layout_is_one_pool(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert [pool.name for pool in placement_of(config, has_critic=False).pools] == ["workers"]
    placement = config.placement
    assert isinstance(placement, PlacementConfig) and placement.rule == "colocate_all"
    pools = {"a": PoolConfig(nodes=1, gpus=4, fraction=1.0)}
    assert replace(placement, pools=pools).rule == "custom"
