"""Broken command lines: each problem is one line that names the key, the value and what to do, and nothing is started.

Problems that the configuration alone shows; tests/trainer/cli/test_preflight.py has missing and invalid files.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from configs.argv import groups_of
from configs.base.keys import CONFIG_DIR, bare_type, keys_of
from configs.schema.ppo import PPOConfig
from tests.broken import ACTOR, CORRECTION, MODEL, OVERLONG, PROGRAMS, ROLLOUT, TWO, check, elsewhere, problems_of  # noqa: F401 - a fixture

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
    """kind: the change of the word. message: parts that the line must contain, the value among them."""

    words: tuple[str, ...]
    kind: str
    message: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.message)}"


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
                for new, *message in breaks(draw, key, value):
                    found[new] = Mutant((*words[:place], new, *words[place + 1 :]), kind, tuple(message))
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
    # verl reads an empty use_kl_loss as false.
    if key in LEAVES and plain(key) in (int, float, bool) and key != f"{ACTOR}.use_kl_loss":
        yield f"{key}=", f'{key}=""', "must be"


def no_equals_sign(draw: random.Random, key: str, value: str) -> Broken:
    yield key, f"{key}: an override is key=value"


def wrong_option(draw: random.Random, key: str, value: str) -> Broken:
    if key in groups_of("ppo_trainer"):
        options = {path.stem for path in (CONFIG_DIR / key).glob("*.yaml")}
        for wrong in {transposed(draw, option) for option in sorted(options)} - options:
            yield f"{key}={wrong}", f"{key}={wrong}: unknown option; known: "


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


MUTANTS = [*mutants(seed=150, each=7)]

# Arguments that no test of tests/configs has, and what the line must contain.
CONTRADICTIONS = [
    ("trainer.n_gpus_per_node=2", "trainer.backend=local: runs a single worker"),
    ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=null: "),
    (
        "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1.0]",
        "algorithm.gdpo_reward_weights=[1.0]: 1 weights for 2 keys, a, b",
    ),
    (f"{CORRECTION}.bypass_mode=true algorithm.use_kl_in_reward=true", f"{CORRECTION}.bypass_mode=true: "),
    (f"{CORRECTION}.rollout_is_threshold=high", f"{CORRECTION}.rollout_is_threshold=high: "),
    (f"{CORRECTION}.rollout_rs=token_k9", f"{CORRECTION}.rollout_rs=token_k9: must be a comma-separated list of "),
    (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=None: must be "),
    (f"{ACTOR}.policy_loss.clip_cov_lb=7.0", f"{ACTOR}.policy_loss.clip_cov_lb"),
    ("reward.models={a:{path:x,wieght:1.0}}", "reward.models.a.wieght: "),
    ("reward.weight=0", "reward.weight=0: "),
    ("data.val_max_samples=0", "data.val_max_samples=0: no prompt is left"),
    (f"{ROLLOUT}.name=tensorrt", f'{ROLLOUT}.name="tensorrt": must be one of embedded, vllm, sglang'),
    (f"{ACTOR}.strategy=deepspeed", f'{ACTOR}.strategy="deepspeed": must be one of fsdp, megatron'),
    (f"{ACTOR}.policy_loss.loss_mode=vanila", f"{ACTOR}.policy_loss.loss_mode=vanila is not known (did you mean vanilla?)"),
    ("algorithm.adv_estimator=grop", "algorithm.adv_estimator=grop is not known (did you mean grpo?)"),
    (f"{ACTOR}.fsdp_config.fsdp_size=0", f"{ACTOR}.fsdp_config.fsdp_size=0: must be -1"),
    ("trainer.dry_run=maybe", 'trainer.dry_run="maybe": must be one of config, full or null'),
    ("trainer=7", "trainer=7: must have keys below it"),
    ("--dry-run", "--dry-run: unknown flag"),
    ("--trainer.seed=1", "--trainer.seed=1: overrides have no dashes; use trainer.seed=1"),
    ("trainer.seed=${nowhere}", "trainer.seed: "),
]

OWN = {
    "own": "defaults: [ppo_trainer, _self_]\ntrainer: {sed: 1}\n",
    "alone": "trainer: {seed: 1}\n",
    "torn": "trainer: {seed: [1\n",
}
OTHERS = [
    ("ppo --config-name=nothing", "--config-name=nothing: unknown configuration"),
    ("ppo --config-dir=. --config-name=own", "trainer.sed: there is no such key; did you mean trainer.seed?"),
    ("ppo --config-dir=. --config-name=alone", "42 keys are missing, the first is data"),
    ("ppo --config-dir=. --config-name=torn", "torn.yaml"),
    ("sft trainer.dry_run=full", "trainer.dry_run=full: trainer.main_sft has no plan to show"),
    ("export trainer.dry_run=full", "trainer.dry_run=full: trainer.main_export has no plan to show"),
    ("eval reward.scorer=none", "reward.scorer=none: nothing would score the responses"),
    ("parity engines=[none]", "none"),
    ("serve port=http", 'port="http": must be a valid integer'),
    ("serve_reward server.port=http", 'server.port="http": must be a valid integer'),
]


BASE = (
    "recipe=quickstart trainer.backend=local trainer.n_gpus_per_node=1 trainer.logger=[] data.train_batch_size=8 "
    f"{ACTOR}.ppo_mini_batch_size=8 {ROLLOUT}.n=4 trainer.default_local_dir=run reward.custom_reward_function.path=reward.py "
    "data.train_files=train.parquet trainer.dry_run=config"
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_one_broken_word_is_a_one_line_error(mutant: Mutant, capsys: pytest.CaptureFixture[str]) -> None:
    check("ppo", mutant.words, mutant.message, capsys)


@pytest.mark.parametrize("line", [*LINES.values(), BASE])
def test_unbroken_lines_are_valid(line: str) -> None:
    assert PROGRAMS["ppo"](["actor_rollout_ref.model.path=a", *line.split(), "trainer.dry_run=config"]) == 0


@pytest.mark.parametrize(("words", "message"), CONTRADICTIONS)
def test_incompatible_keys_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check("ppo", [*BASE.split(), *words.split()], [message], capsys)


@pytest.mark.parametrize(("words", "message"), OTHERS)
def test_other_programs_and_user_configurations_report_errors(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in OWN.items():
        Path(f"{name}.yaml").write_text(text)
    program, *argv = words.split()
    check(program, argv, [message], capsys)


@pytest.mark.parametrize("words", ["trainer.sed=1", "trainer.seed=x", "recipe=quikstart", "trainer.walltime=soon"])
def test_traceback_is_shown_on_request(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At each point where a command line can fail; tests/trainer/cli/test_preflight.py has the others."""
    argv = [*BASE.split(), *words.split()]
    (line,) = problems_of("ppo", argv, capsys)
    assert PROGRAMS["ppo"]([*argv, "trainer.full_traceback=true"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err and err.splitlines()[-1] == f"error: {line}"
