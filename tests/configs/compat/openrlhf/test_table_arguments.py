"""Parsing of OpenRLHF's command lines."""

import pytest

from configs.base.keys import ConfigError
from configs.compat.openrlhf.table import openrlhf, read

TABLE = openrlhf()


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("--bf16", "train_ppo_ray"),
        ("train_rm --bf16", "train_rm"),
        ("train_rm.py --bf16", "train_rm"),
        ("openrlhf.cli.train_sft --bf16", "train_sft"),
        ("python3 -m openrlhf.cli.batch_inference --bf16", "batch_inference"),
        ("deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --bf16", "train_sft"),
        ("deepspeed /src/openrlhf/cli/train_rm.py --bf16", "train_rm"),
        ("ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray --bf16", "train_ppo_ray"),
    ],
)
def test_program_is_found_after_a_launcher(words: str, program: str) -> None:
    arguments = read(words.split(), TABLE)
    assert arguments.source.name == program and list(arguments.typed) == ["bf16"]


def test_values_are_parsed_like_argparse() -> None:
    words = ["--reward_clip_range", "-5", "1e1", "--seed=7", "--target_modules", "q", "k", "--bf16", "--seed", "8"]
    arguments = read(words, TABLE)
    assert arguments.words("reward_clip_range") == ("-5", "1e1")
    assert arguments.words("target_modules") == ("q", "k")
    assert arguments.text("seed") == "8"  # the last one counts
    assert arguments.count("rollout_batch_size") == 1024  # its default


def test_spelling_of_the_flags_selects_the_defaults() -> None:
    older, newer = read(["--pretrain", "m"], TABLE), read(["--actor.model_name_or_path", "m"], TABLE)
    assert (older.newer, newer.newer) == (False, True)
    assert older.text("pretrain") == newer.text("pretrain") == "m"
    assert (older.count("micro_train_batch_size"), newer.count("micro_train_batch_size")) == (4, 1)
    assert older.words("prompt_max_len") == ("1024",) and newer.words("prompt_max_len") == ()
    assert older.words("vllm_is_truncated_threshold") == ("2",) and len(newer.words("vllm_is_truncated_threshold")) == 2
    assert (older.spelt("rollout_batch_size"), newer.spelt("rollout_batch_size")) == ("rollout_batch_size", "rollout.batch_size")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--actor_learnin_rate 1", ["--actor_learnin_rate: train_ppo_ray has no such flag; did you mean --actor_learning_rate?"]),
        ("--actor.adam.lrr=1", ["--actor.adam.lrr: train_ppo_ray has no such flag; did you mean --actor.adam.lr?"]),
        ("--bf16 yes", ["--bf16: takes 0 values, not 1"]),
        ("--bf16=", ["--bf16: takes 0 values, not 1"]),
        ("--seed", ["--seed: takes 1 value, not 0"]),
        ("--seed --adam_betas 1", ["--seed: takes 1 value, not 0", "--adam_betas: takes 2 values, not 1"]),
        ("train_pppo", ["train_pppo: there is no such program of OpenRLHF; did you mean train_ppo?"]),
    ],
)
def test_each_wrong_argument_has_its_line(words: str, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(words.split(), TABLE)
    assert str(caught.value).splitlines() == lines
