import io
import math

import torch
from rich.console import Console

from trainer.ppo.replay_diff import MOST_LINES, Difference, compare_answers, compare_metrics, replayed, table
from workers.batch import Batch


def make_batch() -> Batch:
    """Two prompts, two responses each."""
    return Batch(
        lengths=torch.tensor([4, 5, 3, 6]),
        tokens={"input_ids": torch.arange(18), "rollout_log_probs": -torch.arange(18.0) / 16},
        rows={
            "uid": torch.tensor([10, 10, 11, 11]),
            "sample": torch.tensor([0, 1, 0, 1]),
            "score": torch.tensor([1.0, 0.0, 0.25, 1.0]),
            "reward": torch.tensor([1.0, 0.0, 0.25, 1.0]),
        },
    )


def test_equal_responses_have_no_differences_in_any_order() -> None:
    assert compare_answers(make_batch(), make_batch().select([3, 1, 0, 2]), 0.0) == []


def test_changed_token_is_reported_and_later_tokens_are_not_compared() -> None:
    now = make_batch()
    now.tokens["input_ids"][6] = 99
    now.tokens["rollout_log_probs"][6:9] -= 1.0
    (found,) = compare_answers(make_batch(), now, 0.0)
    assert found == Difference("tokens", "1 of 4 answers; the first: uid 10, sample 1, token 2", 6.0, 99.0, True)


def test_longer_response_differs_where_the_shorter_one_ends() -> None:
    now = make_batch().select([0, 1, 2, 3])
    longer = Batch(
        lengths=torch.tensor([4, 5, 4, 6]),
        tokens={name: torch.cat([column[:12], column[:1], column[12:]]) for name, column in now.tokens.items()},
        rows=now.rows,
    )
    (found,) = compare_answers(make_batch(), longer, 0.0)
    assert (found.where, found.then, found.now) == ("1 of 4 answers; the first: uid 11, sample 0, token 3", None, 0.0)


def test_log_probs_scores_and_rewards_may_differ_up_to_the_bound() -> None:
    now = make_batch()
    now.tokens["rollout_log_probs"][7] += 0.5
    now.tokens["rollout_log_probs"][0] -= 0.25
    now.rows["score"][3] = 0.5
    for bound, beyond in ((0.0, True), (0.49, True), (0.5, False)):
        drift, score = compare_answers(make_batch(), now, bound)
        assert drift == Difference(
            "rollout_log_probs", "2 of 4 answers; the largest: uid 10, sample 1, token 3", -7 / 16, 1 / 16, beyond
        )
        assert score == Difference("score", "1 of 4 answers; the largest: uid 11, sample 1", 1.0, 0.5, beyond)


def test_nan_log_prob_exceeds_every_bound() -> None:
    now = make_batch()
    now.tokens["rollout_log_probs"][1] = math.nan
    (found,) = compare_answers(make_batch(), now, 1e9)
    assert found.what == "rollout_log_probs" and found.beyond


def test_responses_of_one_side_only_are_counted() -> None:
    then = make_batch()
    (found,) = compare_answers(then, then.select([0, 2, 3]), 0.0)
    assert found == Difference("answers", "1 are in one only; uid 10, sample 1 was there", 4.0, 3.0, True)
    (found,) = compare_answers(then.select([0, 1]), then.select([2, 3]), 0.0)
    assert found.where == "4 are in one only; uid 10, sample 0 was there"


def test_metrics_may_differ_up_to_the_relative_bound() -> None:
    then = {"a": 1.0, "b": 200.0, "c": math.nan, "d": math.inf, "gone": 1.0}
    now = {"a": 1.0, "b": 201.0, "c": math.nan, "d": math.inf, "new": 2.0}
    gone, new, b = compare_metrics(then, now, 0.0)
    assert (gone.what, gone.then, gone.now) == ("gone", 1.0, None) and (new.what, new.then) == ("new", None)
    assert b == Difference("b", "", 200.0, 201.0, True)
    assert [found.beyond for found in compare_metrics(then, now, 0.01)] == [True, True, False]
    assert compare_metrics({"c": math.nan}, {"c": 1.0}, 1e9)[0].beyond


def test_metrics_that_a_replay_lacks_are_excluded() -> None:
    metrics = dict.fromkeys(
        ("actor/loss", "timing_s/gen", "perf/mfu", "val-core/x", "val/accuracy", "rollout/verified_bytes"), 1.0
    )
    assert replayed(metrics) == {"actor/loss": 1.0}


def test_table_states_the_number_of_omitted_lines() -> None:
    many = compare_metrics({f"metric_{i}": 1.0 for i in range(MOST_LINES + 3)}, {}, 0.0)
    written = io.StringIO()
    Console(width=120, file=written).print(table("a step", many))
    text = written.getvalue()
    assert "metric_0" in text and "and 3 more" in text and "nothing" in text


def test_rows_of_a_response_are_compared_part_by_part() -> None:
    def parts() -> Batch:
        rows = {
            "uid": torch.tensor([10, 10, 11, 11]),
            "sample": torch.zeros(4, dtype=torch.int64),
            "part": torch.tensor([0, 1, 0, 1]),
        }
        return make_batch().with_rows(**rows)

    now = parts()
    now.tokens["input_ids"][1] = 99
    now.tokens["input_ids"][4] = 99
    (found,) = compare_answers(parts(), now.select([3, 1, 2, 0]), 0.0)
    assert found.where == "2 of 4 answers; the first: uid 10, sample 0, token 1"
    (found,) = compare_answers(parts(), parts().select([0, 2, 3]), 0.0)
    assert found.where == "1 are in one only; uid 10, sample 0, part 1 was there"
