"""Complete runs on conversations of several turns."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_preprocess import tiny_model
from data_preprocess.writer import write
from tests.runs import metrics_of, repeatable
from trainer import main_sft
from trainer.data.order import permutation

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In each conversation the user asks twice for the next digit. folder/{train,test}.parquet, folder/model."""
    folder = tmp_path_factory.mktemp("chats")
    tiny_model.main([f"--save_dir={folder / 'model'}", "--alphabet=0123456789ua"])
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    draws = permutation(400, 3).tolist()
    rows = [{"messages": [*asked(draw % 10), *asked(draw // 10 % 10)]} for draw in draws]
    write(rows[:320], str(folder), "train")
    write(rows[320:336], str(folder), "test")
    return folder


def asked(digit: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(digit)}, {"role": "assistant", "content": str((digit + 1) % 10)}]


def run(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    words = [
        "recipe=sort_digits", "trainer.backend=local", "data.messages_key=messages", f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/test.parquet", f"model.path={task}/model", "data.train_batch_size=32", "trainer.test_freq=1",
        f"trainer.default_local_dir={run_dir}", "trainer.resume_mode=auto", "optim.lr=4e-3", "trainer.total_training_steps=3",
        *overrides,
    ]  # fmt: skip
    assert main_sft.PROGRAM(words) == 0
    return metrics_of(run_dir)


@pytest.fixture(scope="module")
def plain(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run(task, tmp_path_factory.mktemp("plain"), "trainer.total_training_steps=40", "trainer.save_freq=40")


def test_loss_covers_assistant_turns_only(plain: list[dict[str, float]]) -> None:
    """An assistant turn and its EOS are predictable; if all tokens were trained, a loss of 2 ln 10 / 9 = 0.5 would remain."""
    assert plain[0]["val/loss"] > 2 and plain[-1]["val/loss"] < 0.1


def test_run_resumes_bitwise(task: Path, plain: list[dict[str, float]], tmp_path: Path) -> None:
    run(task, tmp_path, "trainer.total_training_steps=10", "trainer.save_freq=10")
    assert repeatable(run(task, tmp_path, "trainer.total_training_steps=40", "trainer.save_freq=40")) == repeatable(plain)


ENGINES = {
    "two workers of Ray's": ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "data.max_token_len_per_gpu=64"),
    "megatron": ("engine.strategy=megatron",),
}


@pytest.mark.parametrize("name", [pytest.param(next(iter(ENGINES)), marks=pytest.mark.soak), "megatron"])
def test_other_engines_and_more_workers_give_the_same_losses(
    task: Path, plain: list[dict[str, float]], tmp_path: Path, name: str
) -> None:
    names = ("train/loss", "train/grad_norm", "val/loss")
    for mine, others in zip(run(task, tmp_path, *ENGINES[name]), plain[:3], strict=True):
        assert {name: mine[name] for name in names} == pytest.approx({name: others[name] for name in names}, rel=1e-3)


# As Qwen3: the last turn has something that earlier turns lack.
DIVIDED = TEMPLATE.replace("{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}u{% endif %}{{ m.content }}")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Override that sets the template DIVIDED."""
    file = tmp_path_factory.mktemp("template") / "divided.jinja"
    file.write_text(DIVIDED)
    return f"model.custom_chat_template=@{file}"


def turns_as_pairs(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """The prompt of each turn under DIVIDED, and the turn."""
    asked_first, first, asked_then, then = (message["content"] for message in chat)
    return [
        {"prompt": f"u{asked_first}a", "response": f"u{first}"},
        {"prompt": f"u{asked_first}a{first}<eos>u{asked_then}a", "response": f"u{then}"},
    ]


def test_divided_conversations_are_trained_as_their_turns(
    task: Path, divided: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step over 32 conversations of two rows is one over 64 pairs of a prompt and its turn: the same losses, bitwise."""
    for name in ("train", "test"):
        chats = [row["messages"] for row in pq.read_table(task / f"{name}.parquet").to_pylist()]
        write([pair for chat in chats for pair in turns_as_pairs(chat)], str(tmp_path), name)
    chats_run = run(task, tmp_path / "chats", divided, "data.shuffle=false")
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert sum("the chat template is not append-only: it renders earlier turns differently (" in note for note in notes) == 1
    assert sum("320 of 320 conversations are 640 rows of training" in note for note in notes) == 1
    assert sum("16 of 16 conversations are 32 rows of training" in note for note in notes) == 1
    pairs = ("data.messages_key=null", f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet")
    pairs_run = run(task, tmp_path / "pairs", *pairs, divided, "data.shuffle=false", "data.train_batch_size=64")
    assert "append-only" not in capfd.readouterr().err
    for step in (*chats_run, *pairs_run):
        step.pop("val/probability", None)  # of a whole conversation, and of a turn
    assert repeatable(chats_run) == repeatable(pairs_run)


def test_run_on_divided_conversations_resumes_bitwise(task: Path, divided: str, tmp_path: Path) -> None:
    """An epoch has 320 / 160 steps: conversations are counted, not rows."""
    words = (divided, "data.train_batch_size=160", "trainer.test_freq=-1")
    whole = run(task, tmp_path / "whole", *words)
    run(task, tmp_path / "broken", *words, "trainer.total_training_steps=1", "trainer.save_freq=1")
    assert repeatable(run(task, tmp_path / "broken", *words)) == repeatable(whole)
    assert [step["training/epoch"] for step in whole] == [0.0, 0.0, 1.0]
