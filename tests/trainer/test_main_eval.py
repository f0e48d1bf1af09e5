"""mean@k, pass@k and maj@k of responses in files, complete runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer import main_eval
from trainer.evaluation.estimators import MAX_VOTERS, clopper_pearson
from trainer.generation.shards import write_rows

# Four prompts of two sources; exact_match compares text exactly.
ROWS: list[dict[str, Any]] = [
    {"data_source": "sort_digits", "responses": ["12", "12", "12", "21"], "reward_model": {"ground_truth": "12"}},
    {"data_source": "sort_digits", "responses": ["1", "3", "3", "4"], "reward_model": {"ground_truth": "1"}},
    {"data_source": "sort_digits", "responses": ["5", "6", "7", "8"], "reward_model": {"ground_truth": "9"}},
    {"data_source": "exact_match", "responses": ["a", "a", "b", "b"], "reward_model": {"ground_truth": "b"}},
]
PASSED = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]


def evaluate(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    arguments = ["reward.num_workers=0", f"trainer.default_local_dir={tmp_path}/out", *overrides]
    assert main_eval.PROGRAM(arguments) == 0
    return json.loads((tmp_path / "out/evaluation.json").read_text())


@pytest.fixture(params=["parquet", "jsonl"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"answers.{request.param}"
    write_rows(path, ROWS)
    return path


def test_metrics_of_scored_responses(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(tmp_path, f"data.path={file}")
    assert list(found) == ["exact_match", "sort_digits", "all"]
    everything = found["all"]
    assert (everything["prompts"], everything["answers"], everything["failed"], everything["prompts@2"]) == (4, 16, 0, 4)
    values = {name: metric["value"] for name, metric in everything.items() if isinstance(metric, dict)}
    assert values == pytest.approx(
        {
            **{f"mean@{k}": 6 / 16 for k in (1, 2, 4)},
            "pass@1": 6 / 16, "pass@2": (1 + 1 / 2 + 0 + 5 / 6) / 4, "pass@4": 3 / 4,
            "maj@1": 6 / 16, "maj@2": 6 / 16,  # either of two different responses
            "maj@4": (1 + 0 + 0 + 1 / 2) / 4,
        }
    )  # fmt: skip
    low, high = clopper_pearson(3, 4)
    assert everything["pass@4"] == {"value": 0.75, "low": low, "high": high, "kind": "exact"}
    assert everything["pass@2"]["kind"] == "bootstrap" and everything["pass@2"]["low"] < values["pass@2"]
    assert found["exact_match"]["maj@4"]["value"] == 0.5 and found["sort_digits"]["pass@4"]["value"] == pytest.approx(2 / 3)
    out = capsys.readouterr().out
    assert "pass@k" in out and "0.7500 [0.1941," in out and f"evaluation: {tmp_path}/out/evaluation.json" in out


def test_scores_of_a_function_equal_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    write_rows(file, ROWS)
    given = tmp_path / "scored/shard_00000.jsonl"
    write_rows(given, [row | {"scores": passed} for row, passed in zip(ROWS, PASSED, strict=True)])
    function = "def compute_score(solution_str, ground_truth, **_):\n    return solution_str == ground_truth\n"
    (tmp_path / "mine.py").write_text(function)
    scored = evaluate(tmp_path, f"data.path={file}", "trainer.seed=3")
    assert evaluate(tmp_path, f"data.path={given.parent}", "data.score_key=scores", "trainer.seed=3") == scored
    by_function = f"custom_reward_function.path={tmp_path}/mine.py"  # as in verl's main_eval
    assert evaluate(tmp_path, f"data.path={file}", by_function, "trainer.seed=3") == scored


def test_a_path_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_eval.PROGRAM([f"data.path={tmp_path}/nope", f"trainer.default_local_dir={tmp_path}/out"]) == 2
    assert f"error: data.path={tmp_path}/nope: no such file or directory" in capsys.readouterr().err


def test_a_source_without_scores_has_counts_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row | {"data_source": name, "scores": list(passed)}
        for row, passed, name in zip(ROWS, PASSED, ["all", "b", "", "unnamed"], strict=True)
    ]
    rows[1]["scores"] = [None] * 4
    write_rows(tmp_path / "a.jsonl", rows)
    found = evaluate(tmp_path, f"data.path={tmp_path}/a.jsonl", "data.score_key=scores", "metrics.k=[4]")
    assert found["b"] == {"prompts": 1, "answers": 0, "failed": 4}
    assert {name: (metrics["prompts"], metrics["answers"]) for name, metrics in found.items()} == {
        "unnamed": (2, 8), "all": (1, 4), "b": (1, 0), "all_": (4, 12)
    }  # fmt: skip
    assert found["all"]["mean@4"]["value"] == 3 / 4 and found["all_"]["mean@4"]["value"] == 5 / 12
    assert re.search(r"b\W+1\W+-\W+-\W+-\W+-\W*\n", capsys.readouterr().out)


def test_responses_without_a_score_are_excluded_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"scores": list(passed)} for row, passed in zip(ROWS[:2], PASSED, strict=False)]
    rows[0]["scores"][3] = None
    write_rows(tmp_path / "a.jsonl", rows)
    found = evaluate(tmp_path, f"data.path={tmp_path}/a.jsonl", "data.score_key=scores", "metrics.k=[1,4]")["sort_digits"]
    assert (found["answers"], found["failed"], found["prompts@1"], found["prompts@4"]) == (7, 1, 2, 1)
    assert found["mean@1"]["value"] == (1 + 1 / 4) / 2 and found["pass@4"]["value"] == 1.0
    assert "note: 1 answers have no score, their rewards failed; they are left out" in capsys.readouterr().err


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), 10**400], ids=["nan", "inf", "-inf", "large"])
def test_a_score_that_is_not_finite_is_a_failed_reward(score: float, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [ROWS[0] | {"scores": [1.0, 1.0, 0.0, score]}])
    found = evaluate(tmp_path, f"data.path={tmp_path}/a.jsonl", "data.score_key=scores", "metrics.k=[3]")["sort_digits"]
    assert (found["answers"], found["failed"]) == (3, 1)
    assert found["mean@3"]["value"] == pytest.approx(2 / 3) and found["pass@3"]["value"] == 1.0


def test_single_response_per_row_with_its_finish_reason(tmp_path: Path) -> None:
    rows = [{"data_source": "sort_digits", "answer": "12", "reward_model": {"ground_truth": "12"}}]
    write_rows(tmp_path / "a.jsonl", rows)
    arguments = [f"data.path={tmp_path}/a.jsonl", "data.response_key=answer"]
    assert evaluate(tmp_path, *arguments)["sort_digits"]["pass@1"]["value"] == 1.0
    write_rows(tmp_path / "a.jsonl", [rows[0] | {"finish_reasons": ["length"]}])
    assert evaluate(tmp_path, *arguments)["sort_digits"]["pass@1"]["value"] == 0.0, "exact_match requires a terminated response"


def test_scores_must_be_as_many_as_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a.jsonl", [ROWS[0] | {"scores": [1.0, 0.0, 1.0]}])
    assert main_eval.PROGRAM([f"data.path={tmp_path}/a.jsonl", "data.score_key=scores"]) == 2
    assert f"error: {tmp_path}/a.jsonl, row 0: 4 answers and 3 scores" in capsys.readouterr().err


def test_majority_is_left_out_above_its_number_of_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n = MAX_VOTERS + 1
    many = {"data_source": "many", "responses": ["a"] * n, "scores": [1.0] + [0.0] * (n - 1)}
    write_rows(tmp_path / "a.jsonl", [many, {"data_source": "few", "responses": ["a", "b"], "scores": [1.0, 0.0]}])
    found = evaluate(tmp_path, f"data.path={tmp_path}/a.jsonl", "data.score_key=scores", "metrics.k=[1,2]")
    for source, has_majority in {"many": False, "few": True, "all": False}.items():
        assert ("maj@2" in found[source], "pass@2" in found[source]) == (has_majority, True), source
    assert found["many"]["pass@2"]["value"] == pytest.approx(2 / n)
    out, err = capsys.readouterr()
    assert "note: maj@k is left out: a prompt has 1001 scored answers, and at most 1000 can be counted" in err
    assert re.search(r"many\W+1\W+2 .*\W-\W*\n", out)


@pytest.mark.parametrize("source", [{"name": "sort_digits"}, ["sort_digits"]])
def test_a_data_source_that_is_no_text_is_named(source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"scores": [0.0] * 4} for row in (ROWS[0], ROWS[1] | {"data_source": source})]
    write_rows(tmp_path / "a.jsonl", rows)
    words = [f"data.path={tmp_path}/a.jsonl", f"trainer.default_local_dir={tmp_path}/out"]
    for scored in ("data.score_key=null", "data.score_key=scores"):
        assert main_eval.PROGRAM([*words, scored]) == 2
        line = (
            f"error: {tmp_path}/a.jsonl, row 1: data_source is {source!r}, a {type(source).__name__}; it must be a text or null"
        )
        assert line in capsys.readouterr().err


def test_columns_that_only_scoring_reads_are_not_checked_with_given_scores(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [ROWS[0] | {"scores": [0.0] * 4, "extra_info": "text"}])
    words = [f"data.path={tmp_path}/a.parquet", "data.score_key=scores"]
    assert evaluate(tmp_path, *words)["sort_digits"]["mean@1"]["value"] == 0.0


@pytest.mark.parametrize("reasons", [["stop", "stop"], "stop"])
def test_finish_reasons_must_be_as_many_as_responses(reasons: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a.jsonl", [ROWS[0], ROWS[1] | {"finish_reasons": reasons}])
    words = [f"data.path={tmp_path}/a.jsonl", "reward.num_workers=0", f"trainer.default_local_dir={tmp_path}/out"]
    assert main_eval.PROGRAM(words) == 2
    line = f"error: {tmp_path}/a.jsonl, row 1: finish_reasons is {reasons!r}, not a list with one for each of 4 answers"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.path={tmp}"], "data.path={tmp}: the directory has no shard_*.parquet or shard_*.jsonl"),
        (["data.response_key=answer"], "{tmp}/a.jsonl: no column 'answer'; it has data_source, responses, reward_model"),
        (["data.score_key=reward_model"], "{tmp}/a.jsonl, row 0: column 'reward_model' is {{'ground_truth': '12'}}, not a list"),
        (["metrics.k=[8]"], "metrics.k=8: no prompt has that many scored answers, the most are 4"),
        (["metrics.vote=box"], "metrics.vote=box is not known"),
    ],
)
def test_invalid_configuration_is_a_one_line_error(
    overrides: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    typed = [f"data.path={tmp_path}/a.jsonl", *(override.format(tmp=tmp_path) for override in overrides)]
    assert main_eval.PROGRAM(["reward.num_workers=0", *typed]) == 2
    lines = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("note: reward.num_workers has no")]
    assert len(lines) == 1 and lines[0].startswith(f"error: {line.format(tmp=tmp_path)}")
