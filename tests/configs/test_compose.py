"""Composition by Hydra of groups, recipes, a user's own YAML and sweeps, without leftovers on disk."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.argv import normalise
from configs.base.keys import CONFIG_DIR, ConfigError, described
from configs.compose import compose, run_jobs
from configs.load import load
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig
from configs.sweeps.sweep_points import Point


def ppo(*overrides: str) -> PPOConfig:
    return compose("ppo_trainer", PPOConfig, overrides)


def jobs(*argv: str) -> list[PPOConfig]:
    """The configuration of each job that this command line starts."""
    command = normalise(argv, PPOConfig, "ppo_trainer")
    seen: list[PPOConfig] = []
    run_jobs(command, "ppo_trainer", lambda tree, point: seen.append(load(tree, PPOConfig, command.typed).config))
    return seen


@pytest.mark.parametrize(
    ("group", "leaves"),
    [
        ("algorithm=ppo", ["algorithm.adv_estimator=gae"]),
        (
            "algorithm=grpo",
            [
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            ],
        ),
        ("rollout=embedded", ["actor_rollout_ref.rollout.name=embedded"]),
        ("rollout=vllm", ["actor_rollout_ref.rollout.name=vllm"]),
        ("rollout=sglang", ["actor_rollout_ref.rollout.name=sglang"]),
        (
            "recipe=quickstart",
            [
                "algorithm.adv_estimator=grpo",
                *(
                    f"{key}={leaf.value}"
                    for key, leaf in described(CONFIG_DIR / "recipe/quickstart.yaml").items()
                    if leaf.value[0] != "*"
                ),
                "actor_rollout_ref.ref.fsdp_config={model_dtype: float32, dtype: float32}",
                "critic.model={path: data/sort_digits/warm, enable_gradient_checkpointing: false}",
                "critic.fsdp_config={model_dtype: float32, dtype: float32}",
                "reward.reward_model.fsdp_config={model_dtype: float32, dtype: float32}",
            ],
        ),
        (
            "recipe=gsm8k_0.5b",
            [
                "algorithm=grpo",
                *(
                    f"{key}='{leaf.value}'" if leaf.value[0] == "~" else f"{key}={leaf.value}"
                    for key, leaf in described(CONFIG_DIR / "recipe/gsm8k_0.5b.yaml").items()
                ),
            ],
        ),
    ],
)
def test_a_group_and_its_leaves_give_the_same_configuration(group: str, leaves: list[str]) -> None:
    assert ppo(group) == ppo(*leaves)


def test_recipes_override_defaults_and_typed_groups_and_keys_override_recipes() -> None:
    assert ppo("recipe=quickstart").algorithm.adv_estimator == "grpo"
    by_ppo = ppo("recipe=quickstart", "algorithm=ppo")
    assert by_ppo.algorithm.adv_estimator == "gae" and by_ppo.data.train_batch_size == 32
    assert not ppo("recipe=quickstart", "algorithm=grpo").actor_rollout_ref.actor.use_kl_loss
    assert ppo("recipe=quickstart", "data.train_batch_size=64").data.train_batch_size == 64
    assert ppo("data.train_batch_size=64", "recipe=quickstart").data.train_batch_size == 64


def test_quick_start_has_the_settings_of_its_published_figures() -> None:
    config = ppo("recipe=quickstart")
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size, actor.ppo_epochs) == (32, 8, 32, 1)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps, actor.optim.lr_scheduler_type) == (3e-4, 5, "cosine")
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    assert (rollout.temperature, actor.grad_clip, trainer.total_training_steps) == (1.0, 1.0, 250)
    assert actor.fsdp_config == config.critic.fsdp_config == config.actor_rollout_ref.ref.fsdp_config
    assert (actor.fsdp_config.model_dtype, actor.fsdp_config.dtype, rollout.dtype) == ("float32", "float32", "float32")


def test_the_megatron_root_changes_only_the_strategy() -> None:
    named = ("--config-name=ppo_megatron_trainer",)
    tp2 = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    (config,) = jobs(*named, "recipe=quickstart", tp2)
    assert config == ppo("recipe=quickstart", "actor_rollout_ref.actor.strategy=megatron", tp2)
    actor, critic, ref = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref
    assert actor.strategy == critic.strategy == ref.strategy == "megatron"
    assert actor.sharding == critic.sharding == ref.sharding == actor.megatron
    assert (actor.megatron.dtype, actor.megatron.tensor_model_parallel_size) == ("float32", 2)
    (typed,) = jobs(*named, "actor_rollout_ref.actor.strategy=fsdp", "algorithm=grpo", "rollout=vllm")
    assert typed == ppo("algorithm=grpo", "rollout=vllm")
    assert len(jobs("-m", *named, "trainer.seed=1,2", "trainer.default_local_dir=x", "trainer.dry_run=config")) == 2


def test_recipes_compute_in_float32_on_both_engines() -> None:
    for strategy in ("fsdp", "megatron"):
        config = compose("sft_trainer", SFTConfig, ["recipe=sort_digits", f"engine.strategy={strategy}"])
        assert config.engine.sharding.dtype == "float32"
        actor = ppo("recipe=quickstart", f"actor_rollout_ref.actor.strategy={strategy}").actor_rollout_ref.actor
        assert actor.sharding.dtype == "float32"


def test_a_role_can_have_another_strategy_and_dtype_than_the_actor() -> None:
    config = ppo("actor_rollout_ref.actor.strategy=megatron", "critic.strategy=fsdp2", "critic.megatron.dtype=fp32")
    assert config.critic.sharding == config.critic.fsdp_config
    assert (config.critic.megatron.dtype, config.actor_rollout_ref.ref.megatron.dtype) == ("float32", "bfloat16")
    reason = r'critic.megatron.dtype="float16": must be one of float32, bfloat16; the Megatron engine does not support float16'
    with pytest.raises(ConfigError, match=reason):
        ppo("critic.megatron.dtype=fp16")


def test_spellings_of_a_key_and_value_give_the_same_configuration() -> None:
    typed = ("critic.fsdp.model_dtype=bf16", "trainer.logger=console", "+trainer.seed=7", "data.train_files=a.parquet")
    assert ppo(*typed) == ppo(
        "critic.fsdp_config.model_dtype=bfloat16", "trainer.logger=[console]", "trainer.seed=7", "data.train_files=[a.parquet]"
    )


@pytest.mark.parametrize(
    ("typed", "mode"),
    [
        ("async_training.partial_rollout=True", "partial"),
        ("partial_rollout=false", None),
        ("async_training.mode=sync", None),
        ("trainer.v1.trainer_mode=sync", None),
        ("trainer.v1.trainer_mode=colocate_async", "partial"),
        ("trainer.v1.trainer_mode=separate_async", "async"),
    ],
)
def test_generation_across_steps_has_the_names_of_verl_and_slime(typed: str, mode: str | None) -> None:
    assert ppo(typed).async_training.mode == mode


def test_free_form_blocks_accept_any_key() -> None:
    config = ppo("ray_kwargs.ray_init.runtime_env.py_executable=python", "+ray_kwargs.ray_init.num_cpus=3")
    assert config.ray_kwargs.ray_init == {"runtime_env": {"py_executable": "python"}, "num_cpus": 3}
    assert ppo("ray_kwargs.ray_init={num_cpus: 3}").ray_kwargs.ray_init == {"num_cpus": 3}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["recipe=quikstart"],
            "recipe=quikstart: unknown option; known: calculator, gsm8k_0.5b, gsm8k_math, "
            "gsm8k_math_ppo, quickstart, search_local; did you mean quickstart?",
        ),
        (["trainer.seed=(1"], "trainer.seed=(1: cannot be parsed; put the value in quotes, key=\"'value'\""),
        (["trainer={sed: 1}"], "trainer.sed: Key 'sed' is not in struct"),
        (["~trainer.seed"], "trainer.seed: missing; set a value"),
        (
            ["actor_rollout_ref.rollout.name=vlm"],
            'actor_rollout_ref.rollout.name="vlm": must be one of embedded, vllm, sglang; did you mean vllm?',
        ),
    ],
)
def test_an_error_of_hydra_is_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(*overrides)
    assert str(caught.value) == line


def test_several_values_need_multirun() -> None:
    with pytest.raises(ConfigError, match="--multirun") as caught:
        jobs("trainer.seed=1,2")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--cfg", "job", "-m"], ["--resolve"]])
def test_contradictory_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        jobs(*flags)


def test_a_single_job_changes_neither_disk_nor_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv, environment = sys.argv, dict(os.environ)
    (config,) = jobs("recipe=quickstart")
    assert config == ppo("recipe=quickstart")
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path
    assert sys.argv is argv and dict(os.environ) == environment


def test_typed_hydra_keys_take_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (config,) = jobs("hydra.output_subdir=asked", "trainer.default_local_dir=x-${hydra:job.config_name}")
    assert config.trainer.default_local_dir == "x-ppo_trainer" and (tmp_path / "asked/overrides.yaml").is_file()


def test_every_job_of_a_sweep_has_its_own_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = jobs("-m", "trainer.default_local_dir=runs/x", "trainer.seed=4,5", "algorithm=ppo,grpo")[:2]
    assert (first.trainer.default_local_dir, first.trainer.seed, first.algorithm.adv_estimator) == ("runs/x/0", 4, "gae")
    assert (second.trainer.default_local_dir, second.trainer.seed, second.algorithm.adv_estimator) == ("runs/x/1", 4, "grpo")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "runs/x/multirun.yaml",
        "runs/x/sweep.lock",
    }


def test_jobs_of_a_sweep_have_separate_remote_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared one they would overwrite each other's checkpoints of the same step."""
    monkeypatch.chdir(tmp_path)
    asked = ("-m", "trainer.checkpoint.remote_dir=s3://bucket/grid", "trainer.seed=4,5", "trainer.dry_run=config")
    assert [one.trainer.checkpoint.remote_dir for one in jobs(*asked)] == ["s3://bucket/grid/0", "s3://bucket/grid/1"]
    assert {one.trainer.checkpoint.remote_dir for one in jobs("-m", "trainer.seed=4,5", "trainer.dry_run=config")} == {None}
    swept = ("-m", "trainer.default_local_dir=runs/a,runs/b", "trainer.dry_run=config")
    for typed, remote in (("s3://grid", ["s3://grid/0", "s3://grid/1"]), ("s3://${hydra:job.num}", ["s3://0", "s3://1"])):
        found = jobs(*swept, f"trainer.checkpoint.remote_dir={typed}")
        assert [one.trainer.checkpoint.remote_dir for one in found] == remote


def test_jobs_of_a_sweep_have_separate_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported models and dumps of samples have the same names in every job."""
    monkeypatch.chdir(tmp_path)
    asked = ("-m", "trainer.seed=4,5", "trainer.dry_run=config", "trainer.default_local_dir=runs/x")
    assert [one.trainer.rollout_data_dir for one in jobs(*asked, "trainer.rollout_data_dir=d")] == ["d/0", "d/1"]
    monkeypatch.setenv("SCRATCH", "/scratch")
    for typed, dirs in (
        ("${oc.env:SCRATCH}/d", ["/scratch/d/0", "/scratch/d/1"]),
        ("d-${hydra:job.num}", ["d-0", "d-1"]),
        ("m/${trainer.experiment_name}", ["m/x/0", "m/x/1"]),
    ):
        found = jobs(*asked, "trainer.experiment_name=x", f"trainer.rollout_data_dir={typed}")
        assert [one.trainer.rollout_data_dir for one in found] == dirs
    swept = jobs("-m", "trainer.default_local_dir=runs/a,runs/b", "trainer.rollout_data_dir=d", "trainer.dry_run=config")
    assert [one.trainer.rollout_data_dir for one in swept] == ["d/0", "d/1"]
    derived = jobs(*asked, "trainer.rollout_data_dir=${trainer.default_local_dir}/d")
    assert [one.trainer.rollout_data_dir for one in derived] == ["runs/x/0/d", "runs/x/1/d"]
    assert {one.trainer.rollout_data_dir for one in jobs(*asked)} == {None}
    command = normalise([*asked, "trainer.export_dir=m"], SFTConfig, "sft_trainer")
    exported: list[str | None] = []
    run_jobs(command, "sft_trainer", lambda tree, _: exported.append(load(tree, SFTConfig).config.trainer.export_dir))
    assert exported == ["m/0", "m/1"]


@pytest.mark.parametrize("typed", ["trainer.default_local_dir=a,b", "trainer.default_local_dir=x-${hydra:job.num}"])
def test_a_sweep_over_run_directories_keeps_their_names(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directories = {config.trainer.default_local_dir for config in jobs("-m", typed, "trainer.seed=1,2", "trainer.dry_run=config")}
    assert directories == ({"a", "b"} if "," in typed else {"x-0", "x-1"})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_files_of_a_sweep_are_next_to_its_numbered_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sweep in (("runs/x_", "runs/x"), ("runs/", "runs/sweep"), ("", "sweep"), ("runs/a,b_", "runs/a,b")):
        typed = f"trainer.default_local_dir='{name}${{hydra:job.num}}'"
        directories = [config.trainer.default_local_dir for config in jobs("-m", typed, "trainer.seed=1,2")]
        assert directories == [f"{name}0", f"{name}1"] and Path(sweep, "multirun.yaml").is_file()


def test_a_dry_run_submits_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5")
    assert len(jobs("-m", *local, "trainer.seed=1,2", "trainer.dry_run=config")) == 2, "they ran in this process"
    mine = Path("mine/hydra/launcher/mine.yaml")
    write(mine, "defaults: [submitit_local]\ntimeout_min: 7\n")
    own = ("--config-dir", "mine", "hydra/launcher=mine", "hydra.launcher.timeout_min=8")
    assert len(jobs("-m", *own, "trainer.seed=1,2", "trainer.dry_run=config")) == 2
    with pytest.raises(ConfigError, match="timeout_mni"):
        jobs("-m", *local, "hydra.launcher.timeout_mni=5", "trainer.seed=1,2", "trainer.dry_run=config")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_files_of_hydra_contain_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kwargs = "reward: {custom_reward_function: {reward_kwargs: {api_token: s3cret, url: 'http://me:s3cret@host'}}}"
    write(tmp_path / "mine/own.yaml", f"defaults: [ppo_trainer, _self_]\n{kwargs}\n")
    own = ("--config-dir", "mine", "--config-name", "own", "hydra.output_subdir=.hydra", "trainer.default_local_dir=run")
    configs = [*jobs(*own), *jobs("-m", *own, "trainer.seed=1,2")]
    assert {config.reward.custom_reward_function.reward_kwargs["api_token"] for config in configs} == {"s3cret"}
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "own.yaml"]
    assert {"multirun.yaml", "config.yaml", "overrides.yaml", "hydra.yaml", "sweep.lock"} == {path.name for path in written}
    assert [path for path in written if "s3cret" in path.read_text()] == []
    assert "***" in (tmp_path / "run/multirun.yaml").read_text()


def test_a_users_configuration_extends_a_built_in_one(tmp_path: Path) -> None:
    write(
        tmp_path / "mine.yaml",
        "defaults: [ppo_trainer, _self_]\n"
        "trainer: {seed: 9, balance_batch: true}\n"
        "critic: {model: {fsdp_config: {param_offload: true, model_dtype: bf16}}}\n",
    )
    (config,) = jobs("--config-dir", str(tmp_path), "--config-name", "mine", "critic.fsdp_config.model_dtype=fp32")
    assert config.trainer.seed == 9 and config.critic.fsdp_config.param_offload
    assert config.critic.fsdp_config.model_dtype == "float32"
    by_hand = ppo("trainer.seed=9", "critic.fsdp_config.param_offload=true")
    assert dataclasses.replace(config, data=by_hand.data) == by_hand


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [ppo_trainer, _self_]\ntrainer: {sede: 9}\n",
            "trainer.sede: there is no such key; did you mean trainer.seed?",
        ),
        ("trainer: {seed: 9}\n", "must extend a built-in one"),
        ("defaults: [ppo_trainer, _self_]\ndata: {datagen: {path: x}}\n", "write generated rows to data.train_files"),
    ],
)
def test_a_mistake_in_a_users_configuration_is_an_error_of_one_line(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", text)
    seen: list[Any] = []

    def job(tree: Any, point: Point | None) -> None:
        with pytest.raises(ConfigError) as caught:
            load(tree, PPOConfig)
        seen.append(str(caught.value))

    run_jobs(normalise(["--config-dir", str(tmp_path), "--config-name", "mine"], PPOConfig, "ppo_trainer"), "ppo_trainer", job)
    assert len(seen) == 1 and message in seen[0] and "\n" not in seen[0]


def test_a_users_recipe_extends_a_built_in_one(tmp_path: Path) -> None:
    write(tmp_path / "recipe/mine.yaml", "# @package _global_\ndefaults: [quickstart]\ntrainer: {seed: 9}\n")
    (config,) = jobs("--config-dir", str(tmp_path), "recipe=mine")
    assert config.trainer.seed == 9 and config.actor_rollout_ref.rollout.n == 8


def test_a_missing_config_dir_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not found"):
        jobs("--config-dir", "nowhere")


def test_a_slurm_sweep_without_slurm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    command = normalise(["--multirun", "hydra/launcher=submitit_slurm", "trainer.seed=1,2"], PPOConfig, "ppo_trainer")
    with pytest.raises(ConfigError, match="srun is not available on this machine; use a login node"):
        run_jobs(command, "ppo_trainer", lambda *_: None)
