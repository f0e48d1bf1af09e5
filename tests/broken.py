"""Problems of a command line, as the user sees them; and files that are broken in all ways."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from data_preprocess.tiny_model import character_tokenizer
from tests.runs import make_task
from trainer import (
    main_dpo,
    main_eval,
    main_export,
    main_generation,
    main_parity,
    main_ppo,
    main_reward_model,
    main_serve,
    main_serve_reward,
    main_sft,
)
from trainer.cli.program import Program

PROGRAMS: dict[str, Program[Any]] = {
    name: module.PROGRAM
    for name, module in {
        "ppo": main_ppo, "sft": main_sft, "reward_model": main_reward_model, "dpo": main_dpo,
        "generation": main_generation, "eval": main_eval, "export": main_export, "parity": main_parity,
        "serve": main_serve, "serve_reward": main_serve_reward,
    }.items()
}  # fmt: skip
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
TWO = "trainer.backend=ray trainer.n_gpus_per_node=2"
ADVICE = re.compile(
    r"did you mean|must|known:|allowed:"
    r"|\b(use|increase|remove|refer|fix|list|set|take|raise|lower|leave|give|name|copy|put|add|install|write|run|choose|takes) "
    r"|; (it|\S+) has |there are |gives each|does not load|such as | at least|expected|\bwants |is from .* to "
)
LONGEST = 700  # characters of a line that is still read


def broken_task(folder: Path) -> Path:
    """A task that can be run, and the same files broken in all ways."""
    make_task(folder, train_size=16, test_size=8, sft_size=8)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    break_data(folder, rows)
    break_models(folder)
    code = {
        "syntax": "def compute_score(:\n",
        "raises": "import nothing_of_this_name\ndef compute_score(**row): return 1.0\n",
        "other": "def score(**row): return 1.0\n",
        "odd": "def compute_score(response, answer): return 1.0\n",
    }
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "reward.txt").write_text(code["other"])
    (folder / "no_step").mkdir()
    (folder / "lost").mkdir()
    (folder / "lost" / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def break_data(folder: Path, rows: list[dict[str, Any]]) -> None:
    def write(name: str, changed: Sequence[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(changed), folder / f"{name}.parquet")

    pq.write_table(pq.read_table(folder / "train.parquet").slice(0, 0), folder / "empty.parquet")
    write("no_prompt", [{key: value for key, value in row.items() if key != "prompt"} for row in rows])
    write("no_truth", [row | {"reward_model": {"style": "rule"}} for row in rows])
    write("no_struct", [row | {"reward_model": "rule"} for row in rows])
    write("strange_source", [row | {"data_source": "sort_digit"} for row in rows])
    write("no_source", [row | {"data_source": None} for row in rows[:1]] + rows)
    write("text_info", [row | {"extra_info": "{}"} for row in rows])
    write("list_source", [row | {"data_source": ["sort_digits"]} for row in rows])
    write("number_source", [row | {"data_source": 3} for row in rows])
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
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
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
    for name, labels in (("one_label", 1), ("three_labels", 3)):
        labelled = AutoConfig.from_pretrained(
            folder / "base", num_labels=labels, architectures=["Qwen2ForSequenceClassification"]
        )
        labelled.save_pretrained(copy(name))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory."""
    monkeypatch.chdir(tmp_path)


def problems_of(program: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The problems of the command line, one per line."""
    assert PROGRAMS[program](argv) == 2, capsys.readouterr()
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    problems = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    assert len(problems) == len(lines), lines
    for line in problems:
        assert ADVICE.search(line), f"no advice in: {line}"
        assert len(line.replace(os.fspath(Path.cwd()), "")) < LONGEST, line
    return problems


def check(program: str, argv: Sequence[str], message: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = problems_of(program, argv, capsys)
    assert any(all(part in line for part in message) for line in lines), lines
    assert not Path("run").exists()
