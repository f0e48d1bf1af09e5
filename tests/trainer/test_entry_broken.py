"""Broken command lines: each problem is one line that names the key, the value and what to do, and nothing is started."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from configs.argv import groups_of
from configs.keys import CONFIG_DIR, bare_type, keys_of
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from tests.runs import make_task
from trainer import (
    main_eval,
    main_export,
    main_generation,
    main_parity,
    main_ppo,
    main_reward_model,
    main_serve_reward,
    main_sft,
)
from trainer.entry import Program

PROGRAMS: dict[str, Program[Any]] = {
    name: module.PROGRAM
    for name, module in {
        "ppo": main_ppo, "sft": main_sft, "reward_model": main_reward_model, "generation": main_generation, "eval": main_eval,
        "export": main_export, "parity": main_parity, "serve_reward": main_serve_reward,
    }.items()
}  # fmt: skip
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
TWO = "trainer.backend=ray trainer.n_gpus_per_node=2"
ADVICE = re.compile(
    r"did you mean|must|known:|\b(set|take|raise|lower|leave|give|name|copy|put|add|install|write|run|choose|takes) "
    r"|; it has |there are |such as | at least|expected|\bwants |is from .* to |only .* has|sets each"
)
LONGEST = 500  # characters of a line that is still read


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that could be run, and beside what it needs the same things broken in all ways."""
    folder = make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=8, sft_size=8)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    break_data(folder, rows)
    break_models(folder)
    code = {
        "syntax": "def compute_score(:\n",
        "raises": "import nothing_of_this_name\ndef compute_score(**row): return 1.0\n",
        "other": "def score(**row): return 1.0\n",
        "empty": "\n",
    }
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "reward.txt").write_text(code["other"])
    (folder / "no_step").mkdir()
    (folder / "lost").mkdir()
    (folder / "lost" / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "mine").mkdir()
    (folder / "mine" / "own.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {sed: 1}\n")
    (folder / "mine" / "alone.yaml").write_text("trainer: {seed: 1}\n")
    (folder / "mine" / "torn.yaml").write_text("trainer: {seed: [1\n")
    return folder


def break_data(folder: Path, rows: list[dict[str, Any]]) -> None:
    def write(name: str, changed: Sequence[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(changed), folder / f"{name}.parquet")

    pq.write_table(pq.read_table(folder / "train.parquet").slice(0, 0), folder / "empty.parquet")
    write("no_prompt", [{key: value for key, value in row.items() if key != "prompt"} for row in rows])
    write("no_truth", [row | {"reward_model": {"style": "rule"}} for row in rows])
    write("no_struct", [row | {"reward_model": "rule"} for row in rows])
    write("strange_source", [row | {"data_source": "sort_digit"} for row in rows])
    write("nothing_asked", [row | {"prompt": []} for row in rows])
    write("few", rows[:3])
    whole = (folder / "train.parquet").read_bytes()
    (folder / "torn.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "text.parquet").write_text("prompt,answer\n")
    (folder / "train.csv").write_text("prompt,answer\n")
    (folder / "broken.jsonl").write_text('{"prompt": \n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "blank.jsonl").write_text("\n")
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (folder / "columns.jsonl").write_text('{"question": "1"}\n')


def break_models(folder: Path) -> None:
    def copy(name: str, *without: str) -> Path:
        shutil.copytree(folder / "base", folder / name, ignore=shutil.ignore_patterns(*without))
        return folder / name

    (folder / "nothing").mkdir()
    copy("no_config", "config.json")
    copy("no_weights", "*.safetensors")
    (copy("pickled", "*.safetensors") / "pytorch_model.bin").write_bytes(b"")
    copy("no_tokenizer", "tokenizer*", "special_tokens*", "chat_template*")
    (copy("pointer", "*.safetensors") / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    weights = (folder / "base" / "model.safetensors").read_bytes()
    (copy("half", "*.safetensors") / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    index = copy("parts") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}))
    (copy("torn_config") / "config.json").write_text("{")
    (copy("unknown_kind") / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    character_tokenizer("abcdef0123456789=").save_pretrained(copy("other_words"))
    silent = copy("no_template")
    (silent / "chat_template.jinja").unlink(missing_ok=True)
    about = json.loads((silent / "tokenizer_config.json").read_text())
    (silent / "tokenizer_config.json").write_text(json.dumps({key: about[key] for key in about if key != "chat_template"}))
    labelled = AutoConfig.from_pretrained(folder / "base", num_labels=3, architectures=["Qwen2ForSequenceClassification"])
    labelled.save_pretrained(copy("three_labels"))


def valid(task: Path) -> list[str]:
    """A run that trainer.dry_run=full finds to be fine."""
    return [
        "recipe=quickstart", "trainer.backend=local", "trainer.n_gpus_per_node=1", "trainer.logger=[]", "reward.num_workers=0",
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"{MODEL}.path={task}/base", f"critic.model.path={task}/base",
        f"reward.custom_reward_function.path={task}/reward.py",
        "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=4",
        "trainer.total_training_steps=2", "trainer.default_local_dir=run", "trainer.dry_run=full",
    ]  # fmt: skip


# Valid command lines, of which one word is broken at random.
LINES = {
    "quickstart": "recipe=quickstart trainer.seed=12 trainer.n_gpus_per_node=2 trainer.default_local_dir=runs/by-hand",
    "ppo": "recipe=quickstart algorithm=ppo actor_rollout_ref.actor.kl_loss_coef=0.01 critic.optim.lr=1e-4 trainer.test_freq=5",
    "grpo": (
        "algorithm=grpo rollout=vllm data.max_prompt_length=1024 data.filter_overlong_prompts=true data.truncation=left "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=true "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
        "actor_rollout_ref.actor.fsdp_config.param_offload=true trainer.nnodes=2 trainer.save_freq=20"
    ),
    "loss": (
        "recipe=quickstart placement=colocate_all actor_rollout_ref.actor.loss_agg_mode=token-mean algorithm.gamma=0.9 "
        "actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=true data.train_batch_size=16 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.temperature=0.8"
    ),
}
LEAVES = keys_of(PPOConfig).leaves


@dataclass(frozen=True)
class Mutant:
    """kind: what was done to the word. said: what the one line must have, the value among it."""

    words: tuple[str, ...]
    kind: str
    said: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.said)}"


def mutants(seed: int, each: int) -> Iterator[Mutant]:
    """``each`` of every kind, over the words of LINES that can be broken so."""
    draw = random.Random(seed)
    broken_by = {
        "misspelt key": misspelt_key, "wrong type": wrong_type, "negative": negative, "not a number": not_a_number,
        "no value": no_value, "no equals sign": no_equals_sign, "wrong group option": wrong_option, "wrong choice": wrong_choice,
    }  # fmt: skip
    for kind, breaks in broken_by.items():
        found = {}
        for words in (tuple(line.split()) for line in LINES.values()):
            for place, word in enumerate(words):
                key, _, value = word.partition("=")
                for new, *said in breaks(draw, key, value):
                    found[new] = Mutant((*words[:place], new, *words[place + 1 :]), kind, tuple(said))
        assert len(found) >= each, f"{kind}: {len(found)}"
        yield from draw.sample([found[new] for new in sorted(found)], each)


def transposed(draw: random.Random, word: str) -> str:
    """Two neighbours in another order."""
    at = draw.choice([at for at in range(len(word) - 1) if word[at] != word[at + 1]])
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


Broken = Iterator[tuple[str, ...]]


def misspelt_key(draw: random.Random, key: str, value: str) -> Broken:
    if key in LEAVES and len(set(key.rpartition(".")[2])) > 1:
        above, _, name = key.rpartition(".")
        wrong = f"{above}.{transposed(draw, name)}"
        yield f"{wrong}={value}", f"{wrong}: there is no such key; did you mean "


def wrong_type(draw: random.Random, key: str, value: str) -> Broken:
    if key in LEAVES and (kind := plain(key)) in (int, float, bool):
        wrong = draw.choice(["many", "1x", "[1]", "{a: 1}"])
        yield f"{key}={wrong}", f"{key}=", "must be a valid integer" if kind is int else "must be"


def negative(draw: random.Random, key: str, value: str) -> Broken:
    bounds = [bound for bound in get_args(bare_type(LEAVES.get(key, str)))[1:] if {"gt", "ge"} & set(dir(bound))]
    if bounds:
        wrong = str(-draw.randint(2, 9))
        yield f"{key}={wrong}", f"{key}={wrong}", "must be greater than"


def not_a_number(draw: random.Random, key: str, value: str) -> Broken:
    if key in LEAVES and plain(key) is float:
        for wrong in ("nan", "inf", "-inf"):
            yield f"{key}={wrong}", f"{key}={wrong}: must be a finite number"


def no_value(draw: random.Random, key: str, value: str) -> Broken:
    if key in LEAVES and plain(key) in (int, float, bool):
        yield f"{key}=", f'{key}=""', "must be"


def no_equals_sign(draw: random.Random, key: str, value: str) -> Broken:
    yield key, f"{key}: an override is key=value"


def wrong_option(draw: random.Random, key: str, value: str) -> Broken:
    if key in groups_of("ppo_trainer"):
        options = {path.stem for path in (CONFIG_DIR / key).glob("*.yaml")}
        for wrong in {transposed(draw, option) for option in sorted(options)} - options:
            yield f"{key}={wrong}", f"{key}={wrong}: there is no such option; known: "


def wrong_choice(draw: random.Random, key: str, value: str) -> Broken:
    choices = get_args(bare_type(LEAVES[key])) if key in LEAVES and isinstance(plain(key), str) else ()
    for wrong in {transposed(draw, choice) for choice in choices} - {*choices}:
        yield f"{key}={wrong}", f'{key}="{wrong}": must be one of {", ".join(choices)}'


def plain(key: str) -> Any:
    """int, float, bool or another type of the leaf; of a choice, its first."""
    kind = bare_type(LEAVES[key])
    if get_origin(kind) is not None and get_args(kind):
        return get_args(kind)[0]
    return kind


MUTANTS = [*mutants(seed=150, each=9)]

# Contradictions, told by the configuration alone. Words, and what the one line must have; others may follow it.
CONTRADICTIONS = [
    (f"data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3: data.train_batch_size=8 is not"),
    (f"{TWO} data.train_batch_size=1 {ACTOR}.ppo_mini_batch_size=1 {ROLLOUT}.n=1", "data.train_batch_size=1: "),
    ("trainer.n_gpus_per_node=2", "trainer.backend=local: runs one worker"),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu=4 {ROLLOUT}.log_prob_max_token_len_per_gpu=99",
        f"{ACTOR}.ppo_max_token_len_per_gpu=4: ",
    ),
    (f"{TWO} {ACTOR}.ppo_micro_batch_size=3", f"{ACTOR}.ppo_micro_batch_size=3: "),
    (f"{ROLLOUT}.max_model_len=3", f"{ROLLOUT}.max_model_len=3: less than "),
    ("algorithm=ppo critic.enable=false", "critic.enable=false: algorithm.adv_estimator=gae needs the critic's values"),
    ("algorithm=ppo critic.ppo_mini_batch_size=5", "critic.ppo_mini_batch_size=5: data.train_batch_size=8 is not a multiple"),
    ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=null: "),
    (
        "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1.0]",
        "algorithm.gdpo_reward_weights=[1.0]: 1 weights for 2 keys, a, b",
    ),
    ("algorithm.truncated_answers=bootstrap", "algorithm.truncated_answers=bootstrap: "),
    (f"{CORRECTION}.bypass_mode=true algorithm.use_kl_in_reward=true", f"{CORRECTION}.bypass_mode=true: "),
    (f"{CORRECTION}.rollout_is_threshold=high", f"{CORRECTION}.rollout_is_threshold=high: "),
    (f"{CORRECTION}.rollout_rs=token_k9", f"{CORRECTION}.rollout_rs=token_k9: must be some of "),
    (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=None: must be "),
    (f"{ACTOR}.policy_loss.clip_cov_lb=7.0", f"{ACTOR}.policy_loss.clip_cov_lb"),
    ("data.gen_batch_size=16", "data.gen_batch_size=16: without algorithm.filter_groups.enable=true"),
    (
        "algorithm.filter_groups.enable=true data.gen_batch_size=2 algorithm.filter_groups.max_num_gen_batches=2",
        "algorithm.filter_groups.max_num_gen_batches=2: 2 rounds of 2 prompts = 4, which cannot fill data.train_batch_size=8",
    ),
    (f"{OVERLONG}.enable=true", f"{OVERLONG}.len=0: "),
    ("reward.shaping.clip=[1,0]", "reward.shaping.clip=[1, 0]: "),
    ("reward.scorer=judge", "reward.scorer=judge: reward.judge.url is null"),
    ("reward.judge.url=http://me:secret@host/v1", "reward.judge.url: a secret on the command line"),
    ("reward.remote_urls=[here]", "reward.remote_urls"),
    ("reward.models={a:{weight:1.0}}", "reward.models.a.path is null"),
    ("reward.models={acc:{path:x}}", "reward.models.acc: "),
    ("reward.models={a:{path:x,wieght:1.0}}", "reward.models.a.wieght: "),
    ("reward.reward_model.enable=true", "reward.reward_model.path is null"),
    ("reward.custom_reward_function.path=null reward.scorer=none", "reward.scorer=none: no reward models either"),
    ("reward.weight=0", "reward.weight=0: "),
    ("data.train_max_samples=2", "data.train_max_samples=2: that is less than one batch"),
    ("data.val_max_samples=0", "data.val_max_samples=0: leaves no prompt"),
    ("trainer.project_name=/x", "trainer.project_name=/x: "),
    ("trainer.experiment_name=../x", "trainer.experiment_name=../x: "),
    ("trainer.resume_mode=resume_path", "trainer.resume_mode=resume_path: trainer.resume_from_path is null"),
    ("trainer.checkpoint.remote_dir=run", "trainer.checkpoint.remote_dir=run: is the run directory itself"),
    ("trainer.walltime=soon", "trainer.walltime"),
    ("trainer.replay.mode=train", "trainer.replay.mode=train: trainer.replay.path is null"),
    ("trainer.replay.path=x", "trainer.replay.path=x: trainer.replay.mode is null"),
    ("placement=custom", "placement.roles.actor=null: "),
    ("placement=split", "placement.layout=split: "),
    ("placement=colocate_pairs", "placement.layout=colocate_pairs: the run has neither a critic nor a reward model"),
    (f"{TWO} placement=custom placement.pools={{a:{{gpus:2}}}} placement.roles.actor=b", "placement.roles.actor=b: no such pool"),
    (f"{TWO} rollout=vllm {ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size=3: does not divide"),
    (f"rollout=vllm {ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.dtype=float64", f"{ROLLOUT}.dtype=float64: "),
    (f"rollout=vllm {ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.temperature=0.001", f"{ROLLOUT}.temperature=0.001: "),
    (
        f"rollout=vllm {ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.engine_kwargs.vllm.seed=1",
        f"{ROLLOUT}.engine_kwargs.vllm.seed: another key says it",
    ),
    (f"{ROLLOUT}.name=tensorrt", f'{ROLLOUT}.name="tensorrt": must be one of embedded, vllm, sglang'),
    (f"{ACTOR}.strategy=deepspeed", f'{ACTOR}.strategy="deepspeed": must be one of fsdp, megatron'),
    (f"{ACTOR}.policy_loss.loss_mode=vanila", f"{ACTOR}.policy_loss.loss_mode=vanila is not known (did you mean vanilla?)"),
    ("algorithm.adv_estimator=grop", "algorithm.adv_estimator=grop is not known (did you mean grpo?)"),
    ("reward.custom_reward_function.path=null reward.scorer=gms8k", "reward.scorer=gms8k is not known (did you mean gsm8k?)"),
    (f"{TWO} {ACTOR}.fsdp_config.fsdp_size=3", f"{ACTOR}.fsdp_config.fsdp_size=3: does not divide 2 workers"),
    (f"{ACTOR}.fsdp_config.fsdp_size=0", f"{ACTOR}.fsdp_config.fsdp_size=0: must be -1"),
    (f"{TWO} {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3: "),
    (f"{ACTOR}.strategy=megatron {MODEL}.lora_rank=8", f"{MODEL}.lora_rank=8: the Megatron engine has no LoRA"),
    (f"{MODEL}.lora_rank=8 {ROLLOUT}.lora_sync=adapter", f"{ROLLOUT}.lora_sync=adapter: the embedded engine"),
    ("alarms.reward.action=rollback", "alarms.reward.action=rollback: without trainer.save_freq"),
    ("data.ptx_files=x.parquet data.ptx_max_length=99999", "data.ptx_max_length=99999: "),
    ("trainer.logger=[console", "trainer.logger=[console: cannot be read"),
    ("trainer.dry_run=maybe", 'trainer.dry_run="maybe": must be one of config, full or null'),
    ("trainer=7", "trainer=7: must have keys below it"),
    ("--config-name=nothing", "nothing"),
    ("--config-dir={task}/mine --config-name=own", "trainer.sed: there is no such key; did you mean trainer.seed?"),
    ("--config-dir={task}/mine --config-name=alone", "keys are missing"),
    ("--config-dir={task}/mine --config-name=torn", "torn"),
    ("--dry-run", "--dry-run: there is no such flag"),
    ("--trainer.seed=1", "--trainer.seed=1: an override has no dashes: trainer.seed=1"),
    ("trainer.seed=${nowhere}", "trainer.seed: "),
]

# What is not there, or is not what it must be: told before anything heavy is loaded, but for the last ones.
KEY = "reward.custom_reward_function"
FILES = [
    (f"{MODEL}.path={{task}}/gone", f"{MODEL}.path={{task}}/gone: no such directory"),
    (f"{MODEL}.path={{task}}/train.parquet", f"{MODEL}.path={{task}}/train.parquet: a file, not a directory"),
    (f"{MODEL}.path={{task}}/nothing", f"{MODEL}.path={{task}}/nothing: no config.json there"),
    (f"{MODEL}.path={{task}}/no_config", f"{MODEL}.path={{task}}/no_config: no config.json there"),
    (f"{MODEL}.path={{task}}/no_weights", f"{MODEL}.path={{task}}/no_weights: no *.safetensors there"),
    (
        f"{MODEL}.path={{task}}/pickled",
        f"{MODEL}.path={{task}}/pickled: no *.safetensors there, and pytorch_model.bin is a pickle",
    ),
    (f"{MODEL}.path={{task}}/pointer", f"{MODEL}.path={{task}}/pointer: model.safetensors is not what its name says"),
    (f"{MODEL}.path={{task}}/half", f"{MODEL}.path={{task}}/half: model.safetensors has "),
    (f"{MODEL}.path={{task}}/parts", f"{MODEL}.path={{task}}/parts: 1 of 2 parts of the weights are not there"),
    (f"{MODEL}.path={{task}}/torn_config", f"{MODEL}.path={{task}}/torn_config: config.json is not what its name says"),
    (f"{MODEL}.path={{task}}/no_tokenizer", f"{MODEL}.path={{task}}/no_tokenizer: no tokenizer there"),
    (f"{MODEL}.tokenizer_path={{task}}/nothing", f"{MODEL}.tokenizer_path={{task}}/nothing: no tokenizer there"),
    ("algorithm=ppo critic.model.path=./gone", "critic.model.path=./gone: no such directory"),
    ("reward.models={a:{path:{task}/gone}}", "reward.models.a.path={task}/gone: no such directory"),
    (
        "reward.models={a:{path:{task}/base,chat_template:gone.jinja}}",
        "reward.models.a.chat_template=gone.jinja: no such file",
    ),
    ("data.train_files={task}/gone.parquet", "data.train_files={task}/gone.parquet: no such file; {task} has "),
    ("data.train_files={task}/gone/x.parquet", "data.train_files={task}/gone/x.parquet: no such file; there is no directory"),
    ("data.train_files={task}/train.csv", "data.train_files={task}/train.csv: not a .parquet, .jsonl or .json file"),
    ("data.train_files=[]", "data.train_files=[]: no data file is given"),
    ("data.train_files={task}/empty.parquet", "data.train_files={task}/empty.parquet: has no rows"),
    ("data.train_files={task}/blank.jsonl", "data.train_files={task}/blank.jsonl: has no rows"),
    ("data.train_files={task}/torn.parquet", "data.train_files={task}/torn.parquet: cannot be read"),
    ("data.train_files={task}/text.parquet", "data.train_files={task}/text.parquet: cannot be read"),
    ("data.train_files={task}/latin.jsonl", "data.train_files={task}/latin.jsonl: cannot be read"),
    ("data.train_files={task}/broken.jsonl", "data.train_files={task}/broken.jsonl, line 1: not JSON"),
    ("data.train_files={task}/list.jsonl", "data.train_files={task}/list.jsonl, line 1: a list"),
    ("data.train_files={task}/columns.jsonl", "data.train_files={task}/columns.jsonl: no column 'prompt'; it has question"),
    ("data.train_files={task}/no_prompt.parquet", "data.train_files={task}/no_prompt.parquet: no column 'prompt'"),
    ("data.train_files={task}/no_truth.parquet", "data.train_files={task}/no_truth.parquet: column 'reward_model' has no field"),
    ("data.val_files={task}/no_struct.parquet", "data.val_files={task}/no_struct.parquet: column 'reward_model' has no field"),
    ("data.prompt_key=question", "data.train_files={task}/train.parquet: no column 'question'"),
    ("data.train_files={task}/few.parquet", "data.train_batch_size=8: data.train_files has 3 rows"),
    (
        f"data.train_files={{task}}/strange_source.parquet {KEY}.path=null",
        "data.train_files: data_source 'sort_digit' has no scorer",
    ),
    ("data.ptx_files={task}/train.parquet data.ptx_max_length=64", "data.ptx_files={task}/train.parquet: no column 'response'"),
    (f"{KEY}.path={{task}}/gone.py", f"{KEY}.path={{task}}/gone.py: no such file; {{task}} has "),
    (f"{KEY}.path={{task}}/reward.txt", f"{KEY}.path={{task}}/reward.txt: not a Python file"),
    (f"{KEY}.path={{task}}/syntax.py", f"{KEY}.path={{task}}/syntax.py: syntax.py does not load: SyntaxError"),
    (f"{KEY}.path={{task}}/other.py", f"{KEY}.path={{task}}/other.py: other.py has no function compute_score; it has score"),
    (f"{KEY}.name=reward", f"{KEY}.path={{task}}/reward.py: reward.py has no function reward; it has compute_score"),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=gone", "trainer.resume_from_path=gone: no such directory"),
    ("algorithm.adv_estimator={task}/gone.py:mine", "algorithm.adv_estimator={task}/gone.py:mine: no such file"),
    (
        "algorithm.adv_estimator={task}/other.py:mine",
        "algorithm.adv_estimator={task}/other.py:mine: other.py has no function mine",
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode={{task}}/syntax.py:mine",
        f"{ACTOR}.policy_loss.loss_mode={{task}}/syntax.py:mine: syntax.py",
    ),
]
LATE = [
    ("trainer.logger=[wnadb]", "trainer.logger=wnadb: no logger wnadb; there are "),
    (f"{KEY}.path={{task}}/raises.py", f"{KEY}.path={{task}}/raises.py: raises.py does not load: ModuleNotFoundError"),
    (f"{KEY}.reward_kwargs={{ground_truth:1}}", f"{KEY}.reward_kwargs: ground_truth comes with every answer"),
    ("data.max_prompt_length=2", "16 of 16 prompts are longer than data.max_prompt_length=2 tokens"),
    ("data.max_prompt_length=2 data.filter_overlong_prompts=true", "data.filter_overlong_prompts leaves nothing"),
    ("data.train_files={task}/nothing_asked.parquet", "nothing_asked.parquet, row 0: the prompt is empty"),
    (f"{MODEL}.path={{task}}/unknown_kind", "model.path={task}/unknown_kind: "),
    (f"{MODEL}.tokenizer_path={{task}}/other_words", f"{MODEL}.tokenizer_path"),
    (f"{MODEL}.path={{task}}/no_template", "{task}/no_template has no chat template"),
    (f"{MODEL}.override_config.rms_norm_epsilon=1", "model.override_config: rms_norm_epsilon not in the config of "),
    (f"{MODEL}.lora_adapter_path={{task}}/nothing", "{task}/nothing"),
    (f"{MODEL}.router_aux_loss_coef=0.1", "model.router_aux_loss_coef=0.1: "),
    ("reward.models={a:{path:{task}/base}}", "reward.models.a: model.path={task}/base: Qwen2ForCausalLM has no score head"),
    ("reward.models={a:{path:{task}/three_labels}}", "reward.models.a: model.path={task}/three_labels: "),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path={task}/no_step",
        "trainer.resume_from_path={task}/no_step: no manifest",
    ),
    ("trainer.default_local_dir={task}/lost", "names step '7', but the checkpoints there are of steps []"),
]
OTHERS = [
    ("sft model.path=/gone", "model.path=/gone: no such directory"),
    (
        "sft model.path={task}/base data.train_files={task}/train.parquet",
        "data.train_files={task}/train.parquet: no column 'response'",
    ),
    ("sft trainer.dry_run=full", "trainer.dry_run=full: trainer.main_sft has no plan to show"),
    ("reward_model model.path={task}/no_tokenizer", "model.path={task}/no_tokenizer: no tokenizer there"),
    ("generation data.path=/gone.parquet", "data.path=/gone.parquet: no such file"),
    ("export trainer.dry_run=full", "trainer.dry_run=full: trainer.main_export has no plan to show"),
    ("eval reward.scorer=none", "reward.scorer=none: nothing would score the answers"),
    ("parity engines=[none]", "none"),
    ("serve_reward server.port=http", 'server.port="http": must be a valid integer'),
]


def told(program: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is wrong with the command line, a problem a line."""
    assert PROGRAMS[program](argv) == 2, capsys.readouterr()
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    problems = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    assert len(problems) == len(lines), lines
    for line in problems:
        assert ADVICE.search(line), f"what is to be done? {line}"
        assert len(line.replace(os.fspath(Path.cwd()), "")) < LONGEST, line
    return problems


def check(program: str, argv: Sequence[str], said: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(program, argv, capsys)
    assert any(all(part in line for part in said) for line in lines), lines
    assert not Path("run").exists()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 50
    assert len({*map(str, MUTANTS)}) + len({*CONTRADICTIONS}) + len({*FILES}) + len({*LATE}) + len({*OTHERS}) >= 150


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_one_word_of_a_valid_line_is_broken(mutant: Mutant, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told("ppo", mutant.words, capsys)
    assert all(part in line for part in mutant.said), line


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_lines_are_valid_before(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS["ppo"]([*line.split(), "trainer.dry_run=config"]) == 0


@pytest.mark.parametrize(("words", "said"), [*CONTRADICTIONS, *FILES, *LATE])
def test_what_does_not_go_together_or_is_not_there(
    words: str, said: str, task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*valid(task), *words.replace("{task}", str(task)).split()]
    check("ppo", argv, [said.replace("{task}", str(task))], capsys)


@pytest.mark.parametrize(("words", "said"), OTHERS)
def test_other_programs(words: str, said: str, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *argv = words.replace("{task}", str(task)).split()
    check(program, argv, [said.replace("{task}", str(task))], capsys)


def test_nothing_is_wrong_with_the_line_that_is_broken(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS["ppo"](valid(task)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "trainer.sed=1",
        "trainer.seed=x",
        "recipe=quikstart",
        f"{ACTOR}.ppo_mini_batch_size=3",
        "data.train_files=gone.parquet",
        f"{KEY}.path={{task}}/raises.py",
    ],
)
def test_the_traceback_is_shown_on_request(words: str, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At each place where a command line can fail."""
    argv = [*valid(task), *words.replace("{task}", str(task)).split()]
    (line,) = told("ppo", argv, capsys)
    assert PROGRAMS["ppo"]([*argv, "trainer.full_traceback=true"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1] == "error: " + line.removesuffix(" (trainer.full_traceback=true shows where)")


@pytest.mark.parametrize("words", ["trainer.sed=1", f"{MODEL}.path=/gone", "data.train_files={task}/empty.parquet"])
def test_as_a_user_meets_them(words: str, task: Path) -> None:
    """In a process of its own, without a dry run: nothing is started, and torch is not even loaded."""
    argv = [word for word in valid(task) if not word.startswith("trainer.dry_run")] + words.replace("{task}", str(task)).split()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer.main_ppo", *argv],
        env=os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("import time:", "note: "))]
    assert result.returncode == 2 and result.stdout == "" and len(lines) == 1, lines
    assert lines[0].startswith("error: ") and ADVICE.search(lines[0])
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "configs" in imported and not imported & {"torch", "ray", "transformers"}
    assert not Path("run").exists()
