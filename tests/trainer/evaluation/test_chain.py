"""The chain's report from synthetic responses, with the expected numbers computed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.test_run_report import HOSTILE, Page
from trainer.evaluation.chain import FIGURES, STAGES, main, write
from trainer.generation.shards import write_rows

# Two prompts with two responses each: (true score, score of the reward model), one prompt per line.
TUNED = [[(0.0, -1.0), (1.0, 3.0)], [(0.0, 1.0), (0.0, -3.0)]]
POLICY = [[(1.0, 3.0), (1.0, 2.0)], [(1.0, 4.0), (0.0, 5.0)]]


def row(uid: int, answers: list[tuple[float, float]], **changes: Any) -> dict[str, Any]:
    made = {
        "uid": uid,
        "prompt": [{"role": "user", "content": f"{uid}{HOSTILE}"}],
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "responses": [f"{HOSTILE}{i}" for i in range(len(answers))],
        "scores": [score for _, score in answers],
        "score_parts": [{"acc": truth, "reward_model": score} for truth, score in answers],
    }
    return made | changes


def make_chain(folder: Path, tuned: list[list[tuple[float, float]]] = TUNED, **changes: Any) -> Path:
    for name in STAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "stage").write_text(
            f"python -m trainer.of_{name} a=b\n{'0123456789abcdef' * 4}  x y\n{'f' * 64}  config.json\nseconds 7\n"
        )
    for name, answers in (("sft", tuned), ("policy", POLICY)):
        rows = [row(uid, own, **(changes if name == "policy" else {})) for uid, own in enumerate(answers)]
        for i, one in enumerate(rows):
            write_rows(folder / f"{name}_answers/answers/shard_{i:05d}.parquet", [one])
    steps = {
        "sft": [{"train/loss": 2.0}, {"train/loss": 1.0}],
        "reward": [{"train/loss": 1.0}, {"train/loss": 0.5, "val/accuracy": 0.75}],
        "ppo": [{"val/accuracy": 0.25, "val-aux/sort/reward_model/mean@1": 0.0, "val-aux/sort/reward/mean@1": 9.0}],
    }
    for name, metrics in steps.items():
        lines = [json.dumps({"training/global_step": i + 1} | step) for i, step in enumerate(metrics)]
        (folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_report_has_the_numbers_of_the_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(make_chain(tmp_path / "chain"))])
    assert f"report: {tmp_path}/chain/report.html" in capsys.readouterr().out
    figures = json.loads((tmp_path / "chain" / FIGURES).read_text())
    found = {name: (way["truth"]["value"], way["model"], way["rescaled"]) for name, way in figures["ways"].items()}
    # Wrong responses of the fine-tuned model score -1 on average, right ones 3.
    assert found == {
        "fine-tuned": (0.25, 0.0, 0.25),
        "fine-tuned, best of 2": (0.5, 2.0, 0.75),
        "fine-tuned, best of 2 by the truth": (0.5, 2.0, 0.75),
        "PPO": (0.75, 3.5, 1.125),
        "PPO, best of 2": (0.5, 4.0, 1.25),
    }
    assert figures["reward_model_accuracy"] == 1.0 and figures["seconds"] == 7 * len(STAGES)


def test_tie_counts_as_half_a_pair(tmp_path: Path) -> None:
    write(make_chain(tmp_path / "chain", [[(0.0, 3.0), (1.0, 3.0), (0.0, 4.0), (0.0, 1.0)], [(0.0, 1.0)] * 4]))
    assert json.loads((tmp_path / "chain" / FIGURES).read_text())["reward_model_accuracy"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_page_has_all_numbers_and_escapes_the_responses(tmp_path: Path) -> None:
    (make_chain(tmp_path / "chain") / "ppo/report.html").touch()
    html = write(tmp_path / "chain").read_text()
    page = Page(html)
    for message in (
        "2 held-out prompts 0.250 → 0.750 +0.500", "score of it 0.00 → 3.50 +3.50", "100.0 %", "time 1 min 3 s",
        "PPO, best of 2 0.500", "x y 0123456789ab", "trainer.of_policy_answers",
    ):  # fmt: skip
        assert message in page.text, message
    assert "config.json" not in page.text
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["ppo/report.html"], "only of stages that have one"
    assert page.text.count(HOSTILE) == 2, "the wrong answer of PPO and its prompt"
    assert not any(tag == "img" for tag, _ in page.tags)
    assert "Best of n" in page.text and "reward model's, rescaled" in page.text


@pytest.mark.parametrize(
    ("tuned", "changes", "message"),
    [
        (TUNED, {"scores": [None, 1.0]}, "policy_answers/answers: 2 answers have no score"),
        ([[(1.0, 1.0)] * 2, [(0.0, 1.0)] * 2], {}, "no prompt has a right and a wrong answer of the fine-tuned model"),
    ],
)
def test_incomparable_runs_are_a_one_line_error(
    tuned: list[list[tuple[float, float]]], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        main([str(make_chain(tmp_path / "chain", tuned, **changes))])


def test_incomplete_chain_is_refused(tmp_path: Path) -> None:
    (make_chain(tmp_path / "chain") / "ppo/stage").unlink()
    for arguments in ([], [str(tmp_path)], [str(tmp_path / "chain")]):
        with pytest.raises(SystemExit, match=r"scripts/run_rlhf_chain_cpu\.sh"):
            main(arguments)
