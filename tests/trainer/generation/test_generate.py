from pathlib import Path
from typing import Any

import pytest

from trainer.generation.generate import accepted, best_of_n, check_scores, content_of_model, generate, pairs, shard_line
from trainer.generation.shards import Shards, write_rows


def row(*answers: tuple[str, float | None, str]) -> dict[str, Any]:
    return {
        "uid": 7,
        "prompt": "p",
        "responses": [text for text, _, _ in answers],
        "scores": [score for _, score, _ in answers],
        "finish_reasons": [reason for _, _, reason in answers],
        "lengths": list(range(len(answers))),
        "log_probs": [-float(i) for i in range(len(answers))],
        "reward_errors": [None if score is not None else "broken" for _, score, _ in answers],
    }


FIRST, LAST = [("c", 0.5, "stop"), ("x", None, "stop"), ("a", 1.0, "stop")], [("a", 1.0, "stop"), ("d", 1.0, "stop")]
MANY = row(*FIRST, ("b", 2.0, "length"), *LAST)


def test_best_of_n_is_the_first_response_with_the_highest_score() -> None:
    best = best_of_n(MANY)
    assert best is not None and best["responses"] == ["b"] and best["lengths"] == [3] and best["uid"] == 7
    tied = best_of_n(row(("a", 1.0, "stop"), ("b", 1.0, "stop")))
    assert tied is not None and tied["responses"] == ["a"] and tied["log_probs"] == [0.0]
    assert best_of_n(row(("x", None, "stop"))) is None


def test_a_shard_without_scores_ends_the_program_only_if_no_shard_has_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts may be those that the reward fails for; a restart would generate the same responses."""
    shards, lost = Shards(tmp_path, "jsonl", 3, {}), [row(("x", None, "stop"), ("y", None, "stop"))]
    with pytest.raises(ValueError, match="all 2 rewards of shard 1 failed; the first: broken"):
        check_scores(lost, shards, 1, repeatable=True)
    write_rows(shards.path(2), [MANY])
    check_scores(lost, shards, 1, repeatable=True)
    with pytest.raises(ValueError, match="all 2 rewards of shard 1 failed"):
        check_scores(lost, shards, 1, repeatable=False)  # a server may be there again in the next run
    assert capsys.readouterr().err == "note: all 2 rewards of shard 1 failed; the first: broken\n"
    check_scores([{"responses": ["x"]}], shards, 1, repeatable=False)  # nothing is scored
    check_scores([*lost, MANY], shards, 1, repeatable=False)
    assert capsys.readouterr().err == ""


def test_shards_in_which_a_reward_failed_are_known_and_counted(tmp_path: Path) -> None:
    """A server may be there again in the next run."""
    whole, partly = row(("a", 1.0, "stop")), row(("b", None, "stop"), ("c", 0.5, "stop"))
    late = partly | {"reward_errors": ["no score from reward.remote_urls: after 3 requests; the last: refused", None]}
    for form in ("jsonl", "parquet"):
        shards = Shards(tmp_path / form, form, 3, {})
        write_rows(shards.path(0), [whole])
        write_rows(shards.path(2), [whole, late])
        assert shards.failed() == [2] and shards.missing() == [1] and shards.failures(2) == 1
        write_rows(shards.path(2), [whole, partly])
        assert shards.failed() == [], "the reward of that response fails, and not the server"
    assert "score 0.750  failed 1  tok/s" in shard_line([whole | {"lengths": [3]}, partly | {"lengths": [3, 3]}], 0, 3, 1.0)


def texts(min_score: float | None, most: int) -> list[str]:
    rows = accepted(MANY, min_score, most)
    assert all(set(one) == {"prompt", "response"} and one["prompt"] == "p" for one in rows)
    return [one["response"] for one in rows]


def test_accepted_responses_terminate_differ_and_reach_the_minimum_score() -> None:
    assert texts(1.0, 9) == ["a", "d"]
    assert texts(None, 9) == ["a", "d", "c"] and texts(0.5, 9) == ["a", "d", "c"]
    assert texts(1.0, 1) == ["a"] and texts(None, 2) == ["a", "d"]
    assert texts(1.5, 9) == []


def test_pairs_are_of_different_terminated_texts_with_the_better_one_chosen() -> None:
    found = pairs(row(("b", 1.0, "stop"), ("a", 2.0, "stop"), ("c", 1.0, "stop"), ("b", 1.0, "stop"), ("d", 9.0, "length")), 9)
    assert found == [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "c"}]
    assert [(one["chosen"], one["rejected"]) for one in pairs(MANY, 9)] == [("a", "c"), ("d", "c")]
    assert len(pairs(MANY, 1)) == 1 and pairs(row(("a", 1.0, "stop"), ("b", None, "stop")), 9) == []


def test_a_shard_is_generated_again_once_and_kept_if_no_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = "no score from reward.remote_urls: after 3 requests; the last: refused"
    lost = row(("a", None, "stop"), ("b", None, "stop")) | {"reward_errors": [error, error]}
    half = row(("a", None, "stop"), ("b", 0.5, "stop")) | {"reward_errors": [error, None]}

    class Fixed:
        data = range(2)

        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self._rows = rows

        def rows(self, indices: range) -> list[dict[str, Any]]:
            return [self._rows[i] for i in indices]

    shards = Shards(tmp_path, "jsonl", 1, {})
    for before, after, kept in (
        ([half, half], [lost, half], 2),
        ([lost, half], [half, half], 2),
        ([lost, lost], [half, half], 2),
    ):
        write_rows(shards.path(0), before)
        generate(Fixed(after), shards, [0], 2, repeatable=False)  # type: ignore[arg-type]
        assert shards.failures(0) == kept, "the shard with fewer failures is kept"
    assert "note: shard 0 is kept: again no server was available for 3 rewards" in capsys.readouterr().err


def test_content_of_a_model_changes_with_its_weights_and_not_with_a_copy(tmp_path: Path) -> None:
    weights = bytearray(range(256)) * 2048
    contents = []
    for name, at in (("a", None), ("copy", None), ("begin", 70), ("middle", len(weights) // 2), ("end", -1)):
        (tmp_path / name).mkdir()
        changed = bytearray(weights)
        if at is not None:
            changed[at] ^= 1
        (tmp_path / name / "model.safetensors").write_bytes(changed)
        contents.append(content_of_model(tmp_path / name))
    assert contents[0] == contents[1] and len({*contents}) == 4
    (tmp_path / "a" / "README.md").write_text("notes")
    assert content_of_model(tmp_path / "a") == contents[0]
