"""Translation of OpenRLHF's flags of files, columns, lengths and validation."""

import pytest

from configs.base.keys import ConfigError
from configs.compat.openrlhf.rules import files_of
from tests.configs.compat.openrlhf.commands import PPO, comment, settings, translated

SAMPLING = "actor_rollout_ref.rollout.val_kwargs"


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("a.parquet,b.jsonl", ["a.parquet", "b.jsonl"]),
        ("org/name", ["data/org/name/test.parquet"]),
        ("/data/set/", ["/data/set/test.parquet"]),
        ("./set,~/set", ["./set/test.parquet", "~/set/test.parquet"]),
    ],
)
def test_data_set_becomes_a_list_of_files(text: str, files: list[str]) -> None:
    assert files_of(text, "test") == files


def test_no_evaluation_set_disables_validation() -> None:
    found = settings(PPO)
    assert found["data.val_files"] == "[prompts.parquet]" and found["data.val_max_samples"] == "1"
    assert found["trainer.val_before_train"] == "false" and "trainer.test_freq" not in found  # -1 in both
    assert comment(PPO + "--eval_steps 5", "--eval_steps 5").endswith("no counterpart: it belongs to eval_dataset")


@pytest.mark.parametrize(("temperature", "sampled"), [("0.7", "true"), ("0", "false")])
def test_evaluation_set_enables_validation(temperature: str, sampled: str) -> None:
    line = f"{PPO} --eval_dataset org/aime --eval_split test --eval_steps 5 --eval_temperature {temperature}"
    found = settings(line)
    assert found["data.val_files"] == "[data/org/aime/test.parquet]" and found["trainer.test_freq"] == "5"
    assert (found[f"{SAMPLING}.do_sample"], found[f"{SAMPLING}.temperature"], found[f"{SAMPLING}.n"]) == (
        sampled,
        temperature,
        "4",
    )


def test_older_length_flags_set_prompt_and_response_length() -> None:
    found = settings(PPO + "--prompt_max_len 300 --generate_max_len 700")
    assert (found["data.max_prompt_length"], found["data.max_response_length"], found["data.truncation"]) == (
        "300",
        "700",
        "right",
    )
    assert "it follows from" in comment(PPO + "--max_len 9", "--max_len 9")


def test_newer_length_flags_leave_the_rest_to_the_prompt() -> None:
    newer = "--actor.model_name_or_path m --reward.model_name_or_path r --data.prompt_dataset p.jsonl "
    found = settings(newer + "--data.max_len 1000 --rollout.max_new_tokens 700")
    assert (found["data.max_prompt_length"], found["data.max_response_length"]) == ("300", "700")
    halves = settings(newer)
    assert (halves["data.max_prompt_length"], halves["data.max_response_length"]) == ("1024", "1024")
    with pytest.raises(ConfigError, match=r"^--data.max_len 500: leaves -200 tokens for a prompt \(500 - 700\)$"):
        translated(newer + "--data.max_len 500 --rollout.max_new_tokens 700")


def test_max_samples_limits_the_rows() -> None:
    assert settings(PPO + "--max_samples 1e5")["data.train_max_samples"] == "100000"
    assert "data.train_max_samples" not in settings(PPO)
    answers = "batch_inference --eval_task generate_vllm --pretrain m --dataset d.jsonl --max_samples 9"
    assert settings(answers)["data.max_samples"] == "9"


def test_pretraining_data_sets_ptx_files_and_coefficient() -> None:
    found = settings(PPO + "--pretrain_data texts.jsonl --ptx_coef 0.1")
    assert found["data.ptx_files"] == "[texts.jsonl]" and found["actor_rollout_ref.actor.ptx_coef"] == "0.1"
    assert "data.ptx_files" not in settings(PPO)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--input_key q --output_key a", {"prompt_key": "q", "response_key": "a"}),
        ("--input_key q --output_key a --apply_chat_template", {"prompt_key": "q", "response_key": "a"}),
        ("--input_key chat --apply_chat_template", {"messages_key": "chat"}),
        ("--input_key chat --output_key a --multiturn", {"messages_key": "chat"}),
        ("--input_key text --pretrain_mode", {}),
    ],
)
def test_column_flags_of_supervised_training_set_keys(flags: str, wanted: dict[str, str]) -> None:
    found = settings(f"train_sft --pretrain m --dataset d.jsonl {flags}")
    names = ("prompt_key", "response_key", "messages_key")
    # a key whose default is the same may be left out only where no flag was typed
    assert {key: found[f"data.{key}"] for key in names if f"data.{key}" in found} == wanted


def test_evaluation_set_of_supervised_training_sets_validation() -> None:
    base = "train_rm --pretrain m --dataset d.jsonl "
    found = settings(base + "--eval_dataset e.jsonl --eval_steps 20")
    assert found["data.val_files"] == "[e.jsonl]" and found["trainer.test_freq"] == "20"
    assert "-1 = once per epoch in OpenRLHF, never here" in comment(base + "--eval_dataset e.jsonl", "--eval_dataset e.jsonl")
    assert "data.val_files" not in settings(base)


def test_preference_pairs_set_the_loss_of_dpo() -> None:
    base = "train_dpo --pretrain sft --dataset pairs.jsonl "
    found = settings(
        base + "--beta 0.05 --label_smoothing 0.1 --nll_loss_coef 0.2 --learning_rate 5e-7 --max_len 2048 --save_path out"
    )
    wanted = {
        "loss.beta": "0.05", "loss.label_smoothing": "0.1", "loss.sft_coef": "0.2", "optim.lr": "5e-7", "data.max_length": "2048",
        "data.truncation": "right", "trainer.export_dir": "out", "data.micro_batch_size_per_gpu": "8",
        "data.use_dynamic_bsz": "false",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted and "loss.kind" not in found and "data.margin_key" not in found
    assert settings(base + "--prompt_key q --chosen_key c --rejected_key r")["data.rejected_key"] == "r"
    assert settings(base)["optim.lr"] == "1e-5", "OpenRLHF's default"
    assert settings(base + "--ipo")["loss.kind"] == "ipo" and "of their sums" in comment(base + "--ipo", "--ipo")
    assert "no counterpart: the reference is the model" in comment(base + "--ref_pretrain other", "--ref_pretrain other")
