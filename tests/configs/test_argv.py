"""Translation of command lines and of keys in a user's YAML."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from configs.argv import CommandLine, normalise, normalise_tree
from configs.base.keys import ConfigError
from configs.compose import compose, run_jobs
from configs.schema.common import MegatronConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig

VERL_MEGATRON = Path(__file__).with_name("verl_megatron.tsv")


def ppo(*argv: str) -> CommandLine:
    return normalise(argv, PPOConfig, "ppo_trainer")


def complaint(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ppo(*argv)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("trainer.seed=3", "trainer.seed=3"),
        ("+trainer.val_before_train=False", "trainer.val_before_train=False"),
        ("++trainer.val_before_train=False", "trainer.val_before_train=False"),
        ("critic.model.fsdp_config.param_offload=True", "++critic.fsdp_config.param_offload=True"),
        ("critic.fsdp.param_offload=True", "++critic.fsdp_config.param_offload=True"),
        ("+critic.model.fsdp_config={param_offload: true}", "++critic.fsdp_config={param_offload: true}"),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name=score"),
        ("+critic.model.lora.adapter_path=a", "critic.model.lora_adapter_path=a"),
        ("+reward_model.overlong_buffer.len=512", "reward.reward_kwargs.overlong_buffer_cfg.len=512"),
        ("+critic.checkpoint.async_save=True", "trainer.checkpoint.async_save=True"),
        ("~trainer.seed", "~trainer.seed"),
        ("trainer.seed=1,2,3", "trainer.seed=1,2,3"),
        ("algorithm=grpo", "algorithm=grpo"),
        ("+recipe=quickstart", "recipe=quickstart"),
        ("~recipe", "~recipe"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("ray_kwargs.ray_init.num_cpus=3", "++ray_kwargs.ray_init.num_cpus=3"),
        ("+ray_kwargs.ray_init.runtime_env.py_executable=python", "++ray_kwargs.ray_init.runtime_env.py_executable=python"),
        ("ray_init.num_cpus=3", "++ray_kwargs.ray_init.num_cpus=3"),
        (
            "actor_rollout_ref.model.override_config.attention_dropout=0.0",
            "++actor_rollout_ref.model.override_config.attention_dropout=0.0",
        ),
        (
            "data.apply_chat_template_kwargs={enable_thinking: false}",
            "++data.apply_chat_template_kwargs={enable_thinking: false}",
        ),
        ("data.train_files=['a=b.parquet']", "data.train_files=['a=b.parquet']"),
    ],
)
def test_a_word_becomes_one_override_without_a_note(typed: str, seen: str) -> None:
    command = ppo(typed)
    assert command.overrides == (seen,) and command.notes == ()


def test_last_value_of_a_key_wins_under_any_alias() -> None:
    command = ppo("critic.fsdp.param_offload=True", "trainer.seed=1", "+critic.fsdp_config.param_offload=False", "trainer.seed=2")
    assert command.overrides == ("++critic.fsdp_config.param_offload=False", "trainer.seed=2")
    assert command.typed == {"critic.fsdp_config.param_offload", "trainer.seed"}
    assert ppo("trainer.seed=1", "trainer={seed: 2}", "trainer.seed=3").overrides == ("trainer={seed: 2}", "trainer.seed=3")


def test_a_foreign_key_that_must_equal_a_known_one_is_compared_with_it() -> None:
    key, known = "actor_rollout_ref.actor.rollout_n", "actor_rollout_ref.rollout.n"
    assert ppo(f"{key}=8", f"{known}=8").overrides == (f"{known}=8",)
    assert ppo(f"{key}=${{{known}}}").overrides == ()
    for words in ((f"{key}=8",), (f"{key}=8", f"{known}=4")):
        assert complaint(*words) == f"{key}=8: set {known}, which every role uses"


def test_a_missing_configuration_directory_of_verl_is_left_out() -> None:
    command = ppo("--config-dir=/a/verl/trainer/config", "--config-name=ppo_megatron_trainer")
    assert command.flags == ("--config-name", "ppo_megatron_trainer")
    assert command.notes == (
        "--config-dir=/a/verl/trainer/config is left out: it is verl's own directory and does not exist here",
    )
    assert ppo("--config-dir=/a/config").flags == ("--config-dir", "/a/config")  # Hydra reports that it does not exist


def test_a_foreign_block_in_braces_is_split_into_its_keys() -> None:
    precision = "+critic.model.fsdp_config.mixed_precision={param_dtype: bf16, reduce_dtype: fp32}"
    command = ppo(precision)
    assert command.overrides == ("++critic.fsdp_config.dtype='bf16'",)
    assert [note.split()[0] for note in command.notes] == ["critic.fsdp_config.mixed_precision.reduce_dtype"]
    assert ppo(precision, "critic.fsdp_config.dtype=fp32").overrides == ("++critic.fsdp_config.dtype=fp32",)
    assert complaint("trainer.sede={a: {b: 1}}").startswith("trainer.sede.a.b: there is no such key")


@pytest.mark.parametrize("quoted", ["plain", "it\\'s", "back\\slash", "ends\\\\", "\\\\\\'", "a, b: {c}", " spaced ", ""])
def test_any_quoted_text_in_braces_is_kept(quoted: str) -> None:
    read = OverridesParser.create().parse_override
    (word,) = ppo(f"actor_rollout_ref.actor.fsdp_config.mixed_precision={{param_dtype: '{quoted}'}}").overrides
    assert read(word).value() == read(f"key='{quoted}'").value()


def test_keys_that_cannot_change_a_result_are_left_out_with_a_note() -> None:
    command = ppo("trainer.balance_batch=False", "actor_rollout_ref.model.use_remove_padding=True", "data.datagen.path=null")
    assert command.overrides == () and command.typed == frozenset()
    assert [note.split()[0] for note in command.notes] == [
        "trainer.balance_batch",
        "actor_rollout_ref.model.use_remove_padding",
        "data.datagen.path",
    ]


def test_last_value_of_a_foreign_key_wins() -> None:
    key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
    assert ppo(f"{key}=8", f"{key}=1").overrides == ()
    assert complaint(f"{key}=1", f"{key}=8").startswith(f"{key}=8: ")


@pytest.mark.parametrize(("typed", "kept"), [("0.5_5", "0.5_5"), ("0.5_5.0", "0.5_5.0"), ("2", "2"), ("'0.5_5'", "0.5_5")])
def test_two_bounds_joined_by_an_underscore_are_text(typed: str, kept: str) -> None:
    """In YAML, and so in Hydra, 0.5_5 is 0.55."""
    key = "algorithm.rollout_correction.rollout_is_threshold"
    words = list(ppo(f"{key}={typed}").overrides)
    assert compose("ppo_trainer", PPOConfig, words).algorithm.rollout_correction.rollout_is_threshold == kept


@pytest.mark.parametrize("name", ["2024_01_05", "1.10", "1e3", "007", "2024", "+5", "x_1", "v1.10"])
def test_a_name_that_looks_like_a_number_is_kept(name: str) -> None:
    words = list(ppo(f"trainer.experiment_name={name}").overrides)
    config = compose("ppo_trainer", PPOConfig, words)
    assert config.trainer.experiment_name == name and config.trainer.default_local_dir == f"runs/{name}"


def test_names_of_a_sweep_that_look_like_numbers_are_kept() -> None:
    assert "trainer.experiment_name='1.10',1.2,'2_0'" in ppo("trainer.experiment_name=1.10,1.2,2_0", "-m").overrides
    for text in ("choice(1.2,'1.10',1.30,a)", "'a,1.10,b'", r"a\,1.10", "1, 2"):
        assert f"trainer.experiment_name={text}" in ppo(f"trainer.experiment_name={text}", "-m").overrides, "as written"


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size=1,2", "sweep over the keys that it sets"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=WSD", "set lr_scheduler_type to cosine, linear or wsd"),
        ("model_engine=veomni", "there are two training engines, fsdp and megatron"),
        ("+actor_rollout_ref.actor.megatron.override_ddp_config.average_in_collective=True", "reduced in float32, once"),
        ("critic.megatron.dynamic_context_parallel=True", "split over context_parallel_size GPUs"),
        ("actor_rollout_ref.actor.megatron.max_seqlen_per_dp_cp_rank=4096", "ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.actor.megatron.override_ddp_config={fp8_param_gather: true}", "reduced in float32, once"),
        ("+actor_rollout_ref.actor.megatron.override_mcore_model_config.hidden_size=3", "override_transformer_config"),
        ("actor_rollout_ref.actor.megatron.qat.enable=True", "quantization-aware training is not supported"),
        ("actor_rollout_ref.actor.megatron.router_replay.mode=R2", "routing replay is not supported yet"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-6", "1e-8 is the only value; leave it out"),
        ("algorithm.use_pf_ppo=True", "PF-PPO is not supported"),
    ],
)
def test_a_foreign_key_that_would_change_a_result_is_refused_with_advice(typed: str, advice: str) -> None:
    line = complaint(typed)
    assert advice in line and "\n" not in line


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_keys_of_verls_megatron_at_their_defaults_are_known_or_left_out(role: str) -> None:
    """None of them is unknown or refused: a command line may spell out defaults."""
    defaults = dict(line.split("\t") for line in VERL_MEGATRON.read_text().splitlines()[1:])
    command = ppo(*(f"{role}.{key}={value}" for key, value in defaults.items()))
    known = {field.name for field in fields(MegatronConfig)}
    real = {f"{role}.{key}" for key in defaults if key.split(".")[1] in known}
    left_out = {f"{role}.{key}" for key in defaults} - real
    assert len(real) == 15 and command.typed == real
    assert {re.split("[ =]", note)[0] for note in command.notes} == left_out
    assert not any(" sets " in note for note in command.notes)


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        (["model_engine=megatron"], {"actor_rollout_ref.actor.strategy=megatron"}),
        (["model_engine=megatron", "actor_rollout_ref.actor.strategy=fsdp"], {"actor_rollout_ref.actor.strategy=fsdp"}),
        (["model_engine=dp"], set()),
        (["data.trust_remote_code=True"], {"actor_rollout_ref.model.trust_remote_code=true"}),
        (
            ["data.trust_remote_code=True", "actor_rollout_ref.model.trust_remote_code=False"],
            {"actor_rollout_ref.model.trust_remote_code=False"},
        ),
        (
            ["+actor_rollout_ref.actor.tis_imp_ratio_cap=2"],
            {"algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2"},
        ),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=-1"], set()),
        (["critic.optim.lr_decay_style=linear"], {"critic.optim.lr_scheduler_type=linear"}),
        (["critic.optim.warmup_style=null", "critic.optim.lr_scheduler_type=cosine"], {"critic.optim.lr_scheduler_type=cosine"}),
    ],
)
def test_a_translated_key_sets_others_unless_they_are_typed(typed: list[str], seen: set[str]) -> None:
    command = ppo(*typed)
    assert set(command.overrides) == seen
    if len(typed) == 1:
        (note,) = command.notes
        assert (" sets " in note) == bool(seen) and all(word in note for word in seen)


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.actor.megatron.expert_model_parallel_size=8", "critic.megatron.use_megatron_fsdp=True"]
)
def test_models_unsupported_on_megatron_are_trained_by_fsdp_whatever_is_typed(key: str) -> None:
    typed = ["model_engine=megatron", "actor_rollout_ref.ref.strategy=megatron", key]
    typed += ["actor_rollout_ref.actor.megatron.context_parallel_size=2", "trainer.n_gpus_per_node=8"]
    command = ppo(*typed)
    config = compose("ppo_trainer", PPOConfig, typed)
    roles = (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic)
    assert {role.strategy for role in roles} == {"fsdp"}
    assert {role.fsdp_config.ulysses_sequence_parallel_size for role in roles} == {2}
    assert any(note.startswith(key.partition("=")[0]) and "FSDP" in note for note in command.notes)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("trainer.n_gpu_per_node=2", "trainer.n_gpus_per_node"),
        ("+trainer.tset_freq=2", "trainer.test_freq"),
        ("++data.train_file=x", "data.train_files"),
        ("actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("data.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("~trainer.sed", "trainer.seed"),
        ("critic.fsdp.param_ofload=1", "critic.fsdp_config.param_offload"),
        ("critic.megatron.tensor_parallel_size=2", "critic.megatron.tensor_model_parallel_size"),
        (
            "actor_rollout_ref.actor.megatron.pipeline_model_paralel_size=2",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(typed: str, nearest: str) -> None:
    line = complaint(typed)
    assert line.endswith(f"there is no such key; did you mean {nearest}?") and "\n" not in line


def test_all_wrong_words_are_reported_together() -> None:
    lines = complaint("trainer.sed=1", "trainer.seed=2", "zzz.qqq=1", "trainer.seed", "trainer.sed", "quickstart").splitlines()
    assert lines == [
        "trainer.seed: an override is key=value; give it a value",
        "trainer.sed: an override is key=value; did you mean trainer.seed?",
        "quickstart: an override is key=value; did you mean recipe=quickstart?",
        "trainer.sed: there is no such key; did you mean trainer.seed?",
        "zzz.qqq: there is no such key",
    ]


@pytest.mark.parametrize(
    ("typed", "flags"),
    [
        (["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"], ("--config-name", "ppo_megatron_trainer")),
        (["--config-path", "./config", "--config-name", "ppo_megatron_trainer"], ("--config-name", "ppo_megatron_trainer")),
        (["-cp", "verl/trainer/config"], ()),
        (["--config-name=dapo_trainer"], ("--config-name", "ppo_trainer")),
        (["--config-name=dapo_megatron_trainer", "--config-path=config"], ("--config-name", "ppo_megatron_trainer")),
        (["--config-name=mine", "--config-dir=conf"], ("--config-dir", "conf", "--config-name", "mine")),
    ],
)
def test_configuration_names_of_verls_scripts_select_built_in_ones(typed: list[str], flags: tuple[str, ...]) -> None:
    assert ppo(*typed).flags == flags


def test_an_existing_directory_with_the_named_configuration_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    flags = ("--config-dir", str(tmp_path / "conf"), "--config-name", "mine")
    assert ppo("--config-path=conf", "--config-name=mine").flags == flags
    assert complaint("--config-path=conf", "--config-name=other") == (
        "--config-path=conf: it contains no other.yaml; built-in configurations, which need no path: "
        "ppo_trainer, ppo_megatron_trainer"
    )
    (tmp_path / "conf/ppo_trainer.yaml").write_text("defaults: [_self_]\n")
    assert ppo("--config-path=conf").flags == ("--config-path", str(tmp_path / "conf"))


def test_flags_and_overrides_are_separated_in_any_order() -> None:
    command = ppo("trainer.seed=1", "--cfg", "job", "data.seed=2", "--config-dir=conf", "-m", "--info", "trainer.nnodes=1")
    assert command.flags == ("--cfg", "job", "--config-dir", "conf", "-m", "--info", "all")
    assert command.overrides == ("trainer.seed=1", "data.seed=2", "trainer.nnodes=1")


def test_an_info_flag_keeps_its_value() -> None:
    assert ppo("--info", "defaults-tree").flags == ("--info", "defaults-tree")


def test_overrides_with_dashes_and_unknown_flags_are_refused() -> None:
    assert complaint("--trainer.seed=1") == "--trainer.seed=1: overrides have no dashes; use trainer.seed=1"
    assert complaint("--multrun") == "--multrun: unknown flag; did you mean --multirun?"


def test_a_group_of_the_users_directory_is_known(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    assert ppo("--config-dir", str(tmp_path), "+experiment=a").overrides == ("+experiment=a",)
    assert "no such key" in complaint("+experiment=a")


@pytest.mark.parametrize(
    ("root", "schema", "group"),
    [
        ("ppo_trainer", PPOConfig, "recipe"),
        ("sft_trainer", SFTConfig, "sft_recipe"),
        ("reward_model_trainer", RewardModelConfig, "reward_recipe"),
        ("dpo_trainer", DPOConfig, "dpo_recipe"),
    ],
)
def test_recipe_is_the_group_of_each_program(root: str, schema: type, group: str) -> None:
    for word in ("recipe=x", "recipe=x,y", "recipe=null"):
        command = normalise([word], schema, root)
        assert (command.overrides, command.notes) == ((f"{group}={word.partition('=')[2]}",), ())
    if group != "recipe":
        command = normalise([f"{group}=x"], schema, root)
        assert command.overrides == (f"{group}=x",)
        assert command.notes == (f"{group} is called recipe in every program: recipe=x",)
        assert normalise([f"{group}=x", "recipe=y"], schema, root).overrides == (f"{group}=y",), "the last one wins"
    with pytest.raises(ConfigError, match=r"did you mean recipe=sort_digits\?|did you mean recipe=quickstart\?"):
        normalise(["quickstart" if group == "recipe" else "sort_digits"], schema, root)


def test_recipe_of_the_users_directory_is_found(tmp_path: Path) -> None:
    """In folders of both names; built-in recipes are found too."""
    for folder, lr in (("recipe", 0.5), ("sft_recipe", 0.25)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"in_{folder}.yaml").write_text(f"# @package _global_\noptim: {{lr: {lr}}}\n")
    directory = f"--config-dir={tmp_path}"

    def rate(name: str, *flags: str) -> float:
        command = normalise([directory, *flags, f"recipe={name}"], SFTConfig, "sft_trainer")
        seen: list[float] = []
        run_jobs(command, "sft_trainer", lambda tree, point: seen.append(tree.optim.lr))
        return seen[0]

    assert rate("in_recipe") == 0.5 and rate("in_sft_recipe") == 0.25
    assert rate("sort_digits") == compose("sft_trainer", SFTConfig, ["recipe=sort_digits"]).optim.lr
    (tmp_path / "own.yaml").write_text("defaults: [sft_trainer, {recipe: null}, _self_]\n")
    assert rate("in_recipe", "--config-name=own") == 0.5, "a group of the user's own defaults list"


@pytest.mark.parametrize(
    ("root", "schema"), [("sft_trainer", SFTConfig), ("reward_model_trainer", RewardModelConfig), ("dpo_trainer", DPOConfig)]
)
def test_unknown_recipe_names_those_of_the_program(root: str, schema: type) -> None:
    with pytest.raises(
        ConfigError, match=r"^recipe=quickstart: unknown option; known: (calculator, )?(search_local, )?sort_digits"
    ):
        compose(root, schema, ["recipe=quickstart"])


def test_aliases_of_one_program_are_unknown_to_another() -> None:
    assert normalise(["model.fsdp_config.dtype=fp32"], SFTConfig, "sft_trainer").overrides == ("engine.fsdp_config.dtype=fp32",)
    assert complaint("model.fsdp_config.dtype=fp32").startswith("model.fsdp_config.dtype: there is no such key")


def test_multiturn_columns_of_verl_set_the_messages_key() -> None:
    def typed(*words: str) -> tuple[str, ...]:
        return normalise(words, SFTConfig, "sft_trainer").overrides

    assert typed("data.multiturn.messages_key=chat", "+data.multiturn.enable=false") == ("data.messages_key=chat",)
    assert typed("data.multiturn.enable=true") == ("data.messages_key=messages",)
    assert typed("data.multiturn.tools_key=t") == ("data.tools_key=t",)


def test_keys_of_a_yaml_are_translated_by_the_same_rules() -> None:
    tree = {
        "critic": {"fsdp_config": {"param_offload": False}, "model": {"fsdp_config": {"param_offload": True}}},
        "custom_reward_function": {"path": "a.py"},
        "trainer": {"balance_batch": True, "seed": 3},
        "ray_init": {"num_cpus": 4},
    }
    normalised, notes = normalise_tree(tree, PPOConfig)
    assert normalised == {
        "critic": {"fsdp_config": {"param_offload": True}},
        "trainer": {"seed": 3},
        "reward": {"custom_reward_function": {"path": "a.py"}},
        "ray_kwargs": {"ray_init": {"num_cpus": 4}},
    }
    assert [note.split()[0] for note in notes] == ["trainer.balance_batch"]


LORA = "actor_rollout_ref.model.lora"
OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("in_yaml", "typed", "key", "value"),
    [
        ({f"{LORA}.rank": 16}, f"{LORA}.rank=4", f"{LORA}_rank", 4),
        ({f"{LORA}.rank": 16}, f"{LORA}.rank=0", f"{LORA}_rank", None),
        ({f"{LORA}.rank": 16}, f"{LORA}_rank=0", f"{LORA}_rank", 0),
        ({f"{LORA}.alpha": 64, f"{LORA}.rank": 16}, "trainer.seed=1", f"{LORA}_alpha", 64),
        ({f"{LORA}.alpha": 64}, f"{LORA}.rank=8", f"{LORA}_alpha", 64),
        ({"model_engine": "megatron"}, f"{LORA}.rank=8", "actor_rollout_ref.actor.strategy", "fsdp"),
        ({f"{LORA}.rank": 16, f"{LORA}.alpha": 64}, "trainer.seed=1", f"{LORA}_alpha", 64),
        ({f"{OPTIM}.lr_decay_style": "cosine"}, f"{OPTIM}.lr_decay_style=linear", f"{OPTIM}.lr_scheduler_type", "linear"),
        ({f"{OPTIM}.lr_decay_style": "cosine"}, f"{OPTIM}.lr_decay_style=constant", f"{OPTIM}.lr_scheduler_type", None),
        ({"model_engine": "megatron"}, "model_engine=dp", "actor_rollout_ref.actor.strategy", None),
        (
            {"async_training.staleness_threshold": 3.0},
            "async_training.staleness_threshold=1.0",
            "async_training.max_staleness",
            1,
        ),
        ({f"{OPTIM}.lr_decay_steps": 100}, f"{OPTIM}.lr_decay_steps=200", f"{OPTIM}.total_training_steps", 200),
        (
            {"actor_rollout_ref.actor.use_token_level_loss": True},
            "actor_rollout_ref.actor.use_token_level_loss=false",
            "actor_rollout_ref.actor.loss_agg_mode",
            "seq-mean-token-mean",
        ),
    ],
)
def test_command_line_overrides_a_foreign_key_in_a_yaml(in_yaml: dict[str, Any], typed: str, key: str, value: Any) -> None:
    command = ppo(typed)
    tree = OmegaConf.create()
    read = OverridesParser.create().parse_override
    for name, given in [*in_yaml.items(), *((word.key_or_group, word.value()) for word in map(read, command.overrides))]:
        OmegaConf.update(tree, name, given, force_add=True)
    plain: Any = OmegaConf.to_container(tree)
    normalised, _ = normalise_tree(plain, PPOConfig, command.typed, command.foreign)
    assert OmegaConf.select(OmegaConf.create(normalised), key, default=None) == value


def test_the_note_of_a_translation_names_what_it_sets() -> None:
    (note,) = [note for note in ppo(f"{LORA}.alpha=64", f"{LORA}.rank=16").notes if "rank=16" in note]
    assert "lora_rank=16" in note and "lora_alpha" not in note


def test_command_line_overrides_an_alias_in_a_yaml() -> None:
    tree = {"critic": {"fsdp_config": {"param_offload": False}, "fsdp": {"param_offload": True}}}
    normalised, _ = normalise_tree(tree, PPOConfig, typed={"critic.fsdp_config.param_offload"})
    assert normalised == {"critic": {"fsdp_config": {"param_offload": False}}}


@pytest.mark.parametrize("key", ["reward.reward_manager.name", "reward_model.reward_manager"])
def test_known_reward_managers_are_left_out_and_others_refused(key: str) -> None:
    for name in ("naive", "dapo", "prime", "batch"):
        assert ppo(f"{key}={name}").overrides == ()
    assert "can take whole batches (solution_strs)" in complaint(f"{key}=mine")


def test_a_foreign_value_that_hydra_cannot_parse_is_an_error_of_one_line() -> None:
    line = "reward_model.reward_loop_source=~/mine.py: cannot be parsed; put the value in quotes"
    assert complaint("reward_model.reward_loop_source=~/mine.py") == line
