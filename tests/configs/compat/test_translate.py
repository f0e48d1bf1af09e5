"""configs/compat.yaml, and defaults compared with verl's."""

import ast
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.argv import normalise
from configs.base.keys import CONFIG_DIR, ConfigError, Keys, keys_of
from configs.compat.translate import Rule, compat
from configs.compose import compose, compose_with_notes
from configs.load import load_sft
from configs.schema.evaluation import EvaluationConfig, ExportConfig
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from configs.validation.rollout import TAKEN_SGLANG_ARGUMENTS, TAKEN_VLLM_ARGUMENTS
from trainer import main_sft

VERL_DEFAULTS = Path(__file__).with_name("verl_defaults.tsv")
DIFFERENCES: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "compat.yaml"))["differences"]  # type: ignore[index, call-overload]


ACTOR = "actor_rollout_ref.actor"
ON_MEGATRON = {
    f"{ACTOR}.strategy": "megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 2,
    f"{ACTOR}.megatron.context_parallel_size": 2,
    f"{ACTOR}.megatron.sequence_parallel": False,
    f"{ACTOR}.megatron.use_distributed_optimizer": False,
    f"{ACTOR}.megatron.dtype": "float32",
    f"{ACTOR}.megatron.param_offload": True,
    f"{ACTOR}.megatron.grad_offload": True,
    f"{ACTOR}.megatron.optimizer_offload": True,
}


def verl_defaults(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: default} of verl's composed configuration with ``changes``; keys have Tandem's names."""
    keys = keys_of(PPOConfig)
    tree = OmegaConf.create()
    for line in VERL_DEFAULTS.read_text().splitlines()[1:]:
        key, text = line.split("\t")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        OmegaConf.update(tree, compat().rename(key, keys), value, force_add=True)
    for key, value in changes.items():
        OmegaConf.update(tree, key, value)
    flat: Any = OmegaConf.to_container(tree, resolve=True)
    return {key: reduce(getitem, key.split("."), flat) for key in changes.keys() | {*_renamed(keys)}}


def _renamed(keys: Keys) -> list[str]:
    return sorted(compat().rename(line.split("\t")[0], keys) for line in VERL_DEFAULTS.read_text().splitlines()[1:])


@pytest.mark.parametrize("changes", [{}, ON_MEGATRON], ids=["fsdp", "megatron"])
def test_defaults_are_verls_unless_the_difference_is_listed(changes: Mapping[str, Any]) -> None:
    """With changes: a key whose default is another key's value follows the same key as in verl."""
    known = {line.split("\t")[0] for line in VERL_DEFAULTS.read_text().splitlines()[1:]}
    keys = keys_of(PPOConfig)
    tandem = OmegaConf.create(asdict(compose("ppo_trainer", PPOConfig, [f"{key}={value}" for key, value in changes.items()])))
    verl = verl_defaults(changes)
    different = []
    for key in _renamed(keys):
        default, expected = OmegaConf.select(tandem, key), verl[key]
        if key in {"data.train_files", "data.val_files"}:
            default = default[0]
        if isinstance(expected, str):
            expected = str(Path(expected).expanduser()) if expected.startswith("~") else expected
        if default != expected and not any(key == known or key.startswith(f"{known}.") for known in DIFFERENCES):
            different.append((key, default, expected))
    assert len(known) > 190 and different == []


def test_listed_differences_are_differences() -> None:
    """Compared unresolved: a default that follows another key differs from a value."""
    tandem: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml"))
    for key, entry in DIFFERENCES.items():
        written = reduce(getitem, key.split("."), tandem)
        assert written != entry["verl"] and entry["why"], key


SCHEMAS = (PPOConfig, SFTConfig, RewardModelConfig, DPOConfig, GenerationConfig, EvaluationConfig, ParityConfig, ExportConfig)


def test_aliases_lead_to_keys_of_a_program_and_hide_none() -> None:
    programs = [keys_of(schema) for schema in SCHEMAS]
    for alias, key in compat().alias.items():
        assert any(keys.knows(key.removesuffix(".*")) for keys in programs), key
        assert not any(keys.knows(alias.removesuffix(".*")) and keys.knows(key.removesuffix(".*")) for keys in programs), alias


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_arguments_of_the_selected_engine_set_keys(engine: str) -> None:
    """As in verl they override the key; a wrong value is reported under the key."""
    rollout = "actor_rollout_ref.rollout"
    taken = {"vllm": TAKEN_VLLM_ARGUMENTS, "sglang": TAKEN_SGLANG_ARGUMENTS}[engine]
    known = compat().engine_arguments[engine]
    assert known.keys() <= taken and {f"{rollout}.{name}" for name in known.values()} <= keys_of(PPOConfig).leaves.keys()
    length, other = {"vllm": ("max_model_len", "sglang"), "sglang": ("context_length", "vllm")}[engine]
    words = [f"{rollout}.name={engine}", f"{rollout}.max_model_len=1100", f"+{rollout}.engine_kwargs.{engine}.{length}=1200"]
    words += [f"+{rollout}.engine_kwargs.{other}.dtype=float16"]
    config, _, notes = compose_with_notes("ppo_trainer", PPOConfig, words)
    assert config.actor_rollout_ref.rollout.max_model_len == 1200
    assert config.actor_rollout_ref.rollout.dtype == compose("ppo_trainer", PPOConfig).actor_rollout_ref.rollout.dtype
    assert notes == [f"{rollout}.engine_kwargs.{engine}.{length} sets {rollout}.max_model_len"]
    with pytest.raises(ConfigError, match=rf'{rollout}\.max_model_len="long": must be'):
        compose("ppo_trainer", PPOConfig, [words[0], f"+{rollout}.engine_kwargs.{engine}.{length}=long"])


def test_ignored_and_refused_keys_are_no_keys_of_a_program() -> None:
    for name in (*compat().accepted, *compat().refused):
        assert "*" in name or not any(keys_of(schema).knows(name) for schema in SCHEMAS), name
    limited = [entry for entry in compat().accepted.values() if entry.cases[0].values is not None]
    assert limited and all(entry.otherwise for entry in limited)


def takes(entry: Rule, value: object) -> bool:
    return entry.case(value, lambda _: None) is not None


def test_accepted_values_are_compared_with_their_type() -> None:
    entry = compat().accepted["data.datagen.path"]
    assert takes(entry, None) and not takes(entry, "a/b") and not takes(entry, 0)
    one = compat().accepted["actor_rollout_ref.rollout.pipeline_model_parallel_size"]
    assert takes(one, 1) and not takes(one, True) and not takes(one, 2)


def test_what_checkpoints_load_is_left_out_only_without_resuming() -> None:
    entry = compat().accepted["*checkpoint.load_contents"]
    assert not takes(entry, ["model"])
    assert entry.case(["model"], {"trainer.resume_mode": "disable"}.get) is not None
    assert entry.case(["model"], {"trainer.resume_mode": "auto"}.get) is None


def test_classes_of_blocks_are_verls() -> None:
    entry = compat().accepted["*._target_"]
    assert takes(entry, "verl.workers.config.FSDPOptimizerConfig") and not takes(entry, "mine.Optimizer")


def test_engine_block_of_verls_sft_trainer_is_translated_for_both_engines() -> None:
    """Command lines of verl's tests/special_e2e/sft/run_sft_engine_gsm8k.sh."""
    common = [
        "model=hf_model",
        "data.pad_mode=no_padding",
        "data.messages_key=messages",
        "optim.betas=[0.9,0.95]",
        "optim.clip_grad=2.0",
    ]
    fsdp = compose(
        "sft_trainer",
        SFTConfig,
        [*common, "engine=fsdp", "optim=fsdp", "engine.strategy=fsdp2", "engine.fsdp_size=4", "engine.param_offload=True"],
    )
    assert fsdp.engine.strategy == "fsdp" and fsdp.engine.grad_clip == 2.0
    assert fsdp.engine.fsdp_config.fsdp_size == 4 and fsdp.engine.fsdp_config.param_offload
    cut = ["engine.tensor_model_parallel_size=2", "engine.virtual_pipeline_model_parallel_size=null", "engine.use_mbridge=True"]
    paced = ["optim.lr_decay_style=constant", "optim.lr_warmup_init=0", "engine.optimizer_offload=True"]
    megatron = compose("sft_trainer", SFTConfig, [*common, "engine=megatron", "optim=megatron", *cut, *paced])
    assert megatron.engine.strategy == "megatron" and megatron.engine.megatron.tensor_model_parallel_size == 2
    assert megatron.engine.megatron.optimizer_offload and not megatron.engine.megatron.param_offload
    assert megatron.optim.lr_scheduler_type == "constant" and megatron.optim.lr_warmup_steps_ratio == 0.1
    experts = compose(
        "sft_trainer", SFTConfig, ["engine=megatron", "engine.expert_model_parallel_size=8", "engine.context_parallel_size=2"]
    )
    assert experts.engine.strategy == "fsdp" and experts.engine.fsdp_config.ulysses_sequence_parallel_size == 2
    with pytest.raises(ConfigError, match="engine=veomni: there are two training engines, fsdp and megatron"):
        compose("sft_trainer", SFTConfig, ["engine=veomni"])


GSM8K = ["data.prompt_key=extra_info", "data.response_key=extra_info", "data.prompt_dict_keys=['question']"]
SFT_LINES = {
    "examples/sft/gsm8k/run_gemma_7b.sh": [
        "data.train_files=a/train.parquet", "data.val_files=a/test.parquet", *GSM8K, "+data.response_dict_keys=['answer']",
        "data.micro_batch_size_per_gpu=4", "model.partial_pretrain=google/gemma-1.1-7b-it", "trainer.default_local_dir=a",
        "trainer.project_name=gsm8k-sft", "trainer.total_epochs=4", "trainer.logger=['console','wandb']",
    ],
    "examples/sft/multiturn/run_qwen_05_sp2.sh, without its tools": [
        "data.multiturn.enable=true", "data.multiturn.messages_key=messages", "data.micro_batch_size=4",
        "model.partial_pretrain=a",
        "model.fsdp_config.cpu_offload=false", "model.fsdp_config.offload_params=false", "optim.lr_scheduler=wsd",
        "ulysses_sequence_parallel_size=2", "use_remove_padding=true", "trainer.default_hdfs_dir=null",
    ],
    "tests/special_e2e/sft/run_sft_engine_gsm8k.sh": [
        "data.messages_key=messages", "engine=megatron", "optim=megatron", "optim.lr=1e-5", "optim.lr_warmup_init=0",
        "optim.lr_decay_style=cosine", "optim.min_lr=1e-6", "engine.tensor_model_parallel_size=2",
        "trainer.test_freq=after_each_epoch", "trainer.save_freq=-1", "trainer.total_training_steps=2", "model.path=a",
    ],
}  # fmt: skip


def sft(*words: str) -> SFTConfig:
    return compose("sft_trainer", SFTConfig, words)


def sft_complaint(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        sft(*words)
    return str(error.value)


@pytest.mark.parametrize("name", SFT_LINES)
def test_public_command_lines_of_verls_sft_trainer_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_sft.PROGRAM([*SFT_LINES[name], "trainer.dry_run=config"]) == 0
    assert capsys.readouterr().out.startswith("configuration is fine")


def test_field_of_a_column_is_joined_to_the_columns_key() -> None:
    data = sft(*GSM8K, "data.response_dict_keys=[a,b]").data
    assert (data.prompt_key, data.response_key) == ("extra_info.question", "extra_info.a.b")
    quoted = sft('data.prompt_key="extra_info"', "data.prompt_dict_keys=['question']").data
    assert quoted.prompt_key == "extra_info.question"
    assert sft("data.prompt_key=x", "data.prompt_dict_keys=null", "data.response_dict_keys=[]").data.prompt_key == "x"
    lonely = sft_complaint("data.prompt_dict_keys=['question']", "data.response_key=a,b", "data.response_dict_keys=[c]")
    assert lonely.splitlines() == [
        f"data.{side}_dict_keys=['{field}']: set data.{side}_key=COLUMN.FIELD instead"
        for side, field in (("prompt", "question"), ("response", "c"))
    ]


def test_sft_keys_in_the_users_yaml_are_translated() -> None:
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "sft_trainer.yaml"))
    del tree["defaults"]
    tree["data"] |= {"prompt_key": "extra_info", "prompt_dict_keys": ["question"]}
    tree["optim"] |= {"lr": 1e-5, "min_lr": 1e-6}
    config = load_sft(tree)
    assert config.data.prompt_key == "extra_info.question" and config.optim.min_lr_ratio == pytest.approx(0.1)


def test_min_lr_becomes_a_ratio_of_lr() -> None:
    assert sft("optim.lr=2e-5", "optim.min_lr=1e-6").optim.min_lr_ratio == pytest.approx(0.05)
    assert sft("optim.min_lr=1e-6", "optim.min_lr_ratio=0.2").optim.min_lr_ratio == 0.2
    words = [f"{role}.optim.{key}" for role in (ACTOR, "critic") for key in ("lr=1e-5", "min_lr=1e-6", "lr_decay_style=linear")]
    ppo = compose("ppo_trainer", PPOConfig, words)
    for optim in (ppo.actor_rollout_ref.actor.optim, ppo.critic.optim):
        assert optim.min_lr_ratio == pytest.approx(0.1) and optim.lr_scheduler_type == "linear"
    assert sft_complaint("optim.lr=1e-6", "optim.min_lr=2e-6").startswith("optim.min_lr_ratio=2.0: must be less")
    assert sft_complaint("optim.lr=0", "optim.min_lr=1e-5") == "optim.min_lr_ratio=inf: must be a finite number"
    assert sft_complaint("optim.min_lr=low") == 'optim.min_lr_ratio="low": must be a valid number'


def test_schedules_frequencies_and_columns_of_verls_sft_trainer_are_translated() -> None:
    config = sft("recipe=sort_digits", "optim.lr_decay_style=cosine", "trainer.save_freq=after_each_epoch")
    assert config.optim.lr_scheduler_type == "cosine" and config.trainer.save_freq == "after_each_epoch"
    assert sft_complaint("trainer.test_freq=daily") == 'trainer.test_freq="daily": must be a valid integer, or after_each_epoch'
    assert sft("model.fsdp_config.cpu_offload=true").engine.fsdp_config.param_offload
    assert sft("data.multiturn.enable=true").data.messages_key == "messages"
    assert sft("data.multiturn.enable=true", "data.multiturn.messages_key=chat").data.messages_key == "chat"


def test_keys_of_verls_main_generation_are_translated() -> None:
    words = ["data.n_samples=4", "model.path=a/model", "+model.trust_remote_code=True", "rollout.prompt_length=2048"]
    words += ["rollout.response_length=1024", "rollout.tensor_model_parallel_size=1", "rollout.top_k=50", "rollout.mode=sync"]
    config = compose("generation", GenerationConfig, words)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    assert (model.path, model.trust_remote_code) == ("a/model", True)
    assert (rollout.n, rollout.top_k, rollout.tensor_model_parallel_size) == (4, 50, 1)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 1024)


def test_foreign_values_of_known_keys_are_translated() -> None:
    """Other values are kept; forced settings override the command line."""
    on_fsdp = "actor_rollout_ref.actor.megatron.use_megatron_fsdp=true"
    words = ["trainer.test_freq=False", "trainer.resume_from_path=False", on_fsdp]
    command = normalise([*words, "actor_rollout_ref.actor.strategy=megatron"], PPOConfig, "ppo_trainer")
    assert {"trainer.test_freq=-1", "trainer.resume_from_path=null", "actor_rollout_ref.actor.strategy=fsdp"} <= {
        *command.overrides
    } and len(command.notes) == 3
    plain = ["trainer.test_freq=5", "trainer.resume_from_path=a/b", "actor_rollout_ref.actor.megatron.dtype=float32"]
    command = normalise(plain, PPOConfig, "ppo_trainer")
    assert command.overrides == tuple(plain) and not command.notes


def test_rank_of_verls_megatron_lora_sets_its_default_alpha() -> None:
    lora = "actor_rollout_ref.model.lora"
    ulysses = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    assert f"{ulysses}=2" in normalise([f"{lora}.rank=8", f"{ulysses}=2"], PPOConfig, "ppo_trainer").overrides
    assert f"{lora}_alpha=32" in normalise([f"{lora}.rank=8"], PPOConfig, "ppo_trainer").overrides
    assert f"{lora}_alpha=64" in normalise([f"{lora}.rank=8", f"{lora}.alpha=64"], PPOConfig, "ppo_trainer").overrides
    assert not normalise([f"{lora}.rank=0"], PPOConfig, "ppo_trainer").overrides


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("actor_rollout_ref.actor.optim.weight_decay=0.1", "norms and biases are not decayed here"),
        ("critic.optim.lr_warmup_steps_ratio=0.05", "verl starts with lr 0"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=10,20", "verl starts with lr 0"),
        ("actor_rollout_ref.model.lora.lora_A_init_method=xavier", "the Kaiming uniform rule here"),
    ],
)
def test_a_key_with_different_numbers_than_verl_is_reported_once(typed: str, why: str) -> None:
    notes = normalise([typed, typed], PPOConfig, "ppo_trainer").notes
    assert len(notes) == 1 and why in notes[0]
    assert notes[0].startswith(f"{typed.partition('=')[0]}=") and ": results differ from verl's: " in notes[0]


@pytest.mark.parametrize(
    "typed",
    [
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=-1",
        "critic.optim.lr_warmup_steps_ratio=0",
        "trainer.seed=3",
    ],
)
def test_a_value_without_numerical_difference_is_not_reported(typed: str) -> None:
    assert normalise([typed], PPOConfig, "ppo_trainer").notes == ()


def test_defaults_and_recipes_report_no_numerical_difference() -> None:
    for words in ([], ["recipe=quickstart"], ["recipe=quickstart", "algorithm=ppo"]):
        assert not any("differ from verl" in note for note in compose_with_notes("ppo_trainer", PPOConfig, words)[2])


def test_every_key_with_different_numbers_exists() -> None:
    keys = [*keys_of(PPOConfig).leaves, *compat().accepted]
    assert all(any(fnmatchcase(key, pattern) for key in keys) for pattern in compat().numbers)


def test_memory_limit_of_verls_sandbox_sets_that_of_code_rewards() -> None:
    command = normalise(["reward_model.sandbox_fusion.memory_limit_mb=2048"], PPOConfig, "ppo_trainer")
    assert command.overrides == ("reward.code.memory_limit_mb=2048",)
    config, *_ = compose_with_notes("ppo_trainer", PPOConfig, ["reward.sandbox_fusion.memory_limit_mb=null"])
    assert config.reward.code.memory_limit_mb == 1024


def test_random_sampler_of_verls_examples_shuffles_whatever_was_set() -> None:
    name = "data.sampler.class_name"
    words = [f"{name}=RandomCurriculumSampler", "data.shuffle=false"]
    assert normalise(words, PPOConfig, "ppo_trainer").overrides == ("data.shuffle=true",)
    with pytest.raises(ConfigError, match=f"{name}=Mine: data.shuffle and data.seed define the order"):
        normalise([f"{name}=Mine"], PPOConfig, "ppo_trainer")


@pytest.mark.parametrize(
    ("root", "schema"), [("sft_trainer", SFTConfig), ("dpo_trainer", DPOConfig), ("reward_model_trainer", RewardModelConfig)]
)
def test_no_epochs_are_refused_by_programs_without_val_only(root: str, schema: type) -> None:
    """They would train the default number of epochs if the value were left out."""
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs=0: must be greater than 0"):
        compose(root, schema, ["trainer.total_epochs=0"])
    assert compose("ppo_trainer", PPOConfig, ["trainer.total_epochs=0"]).trainer.val_only
