"""Complete runs on conversations of several turns."""

from pathlib import Path

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
        "sft_recipe=sort_digits", "trainer.backend=local", "data.messages_key=messages", f"data.train_files={task}/train.parquet",
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
