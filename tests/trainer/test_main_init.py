"""The command line of trainer.main_init, and the commands that its README names."""

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_preprocess import tiny_model
from trainer.main_init import init

# Programs and files are those of a user, the numbers of rows and steps are not.
SHORT = {
    "task.py": ["--train_size=512", "--test_size=32"],
    "trainer.main_sft": ["trainer.total_training_steps=4", "data.train_batch_size=32", "trainer.test_freq=2"],
    "trainer.main_reward_model": ["trainer.total_training_steps=2", "data.train_batch_size=32"],
    "trainer.main_dpo": ["trainer.total_training_steps=2", "data.train_batch_size=32"],
    "trainer.main_ppo": [
        "trainer.total_training_steps=2", "trainer.test_freq=2", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "reward.num_workers=0",
    ],
}  # fmt: skip
EXAMPLES = [{"question": f"{a} + 1?", "answer": f"#### {a + 1}"} for a in range(64)]


def run_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the README's commands in the folder, shortened; all but its tests in this process, which has imported everything."""
    monkeypatch.chdir(folder)
    for line in re.findall(r"^    (.*)$", (folder / "README.md").read_text(), re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[:2] == ["pip", "install"]:
            continue
        assert words[0] == "python"
        if "unittest" in words:
            subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        elif words[1] == "task.py":
            monkeypatch.setattr(sys, "argv", [*words[1:], *SHORT["task.py"]])
            runpy.run_path("task.py", run_name="__main__")
        else:
            module, arguments = importlib.import_module(words[2]), [*words[3:], *SHORT.get(words[2], [])]
            assert (module.PROGRAM if words[2].startswith("trainer.") else module.main)(arguments) in (0, None), line


def test_commands_of_the_readme_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(["my_task"]) == 0
    run_readme(tmp_path / "my_task", monkeypatch)
    steps = [json.loads(line) for line in (tmp_path / "my_task/runs/grpo/metrics.jsonl").read_text().splitlines()]
    assert "val/accuracy" in steps[-1] and (tmp_path / "my_task/runs/grpo/report.html").is_file()


@pytest.mark.soak
@pytest.mark.parametrize("template", ["chat", "tool", "preferences", "gsm8k"])
def test_commands_of_the_other_readmes_run(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(["my_task", "--from", template]) == 0
    folder = tmp_path / "my_task"
    if template == "gsm8k":  # no network here: examples of a file, and a tiny model
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES)))
        monkeypatch.setitem(SHORT, "task.py", [f"--local_dataset_path={tmp_path}"])
        model = "actor_rollout_ref.model.path=model"
        monkeypatch.setitem(SHORT, "trainer.main_ppo", [*SHORT["trainer.main_ppo"], model])
        tiny_model.main(["--save_dir", f"{folder}/model", "--bytes"])
    run_readme(folder, monkeypatch)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["my_task", "--from", "chess"],
            "--from chess: there is no such task to begin with; own, chat, tool, gsm8k, preferences",
        ),
        (["there"], "there exists already, and nothing in it was changed; take another name"),
        (["my task"], "my task: a task's name has letters, digits, - and _, and begins with a letter"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert init(words) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
