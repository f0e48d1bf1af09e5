"""Problems reported when a metric exceeds its bound."""

from dataclasses import replace

import pytest

from configs.compose import compose
from configs.schema.parity import BoundsConfig, ParityConfig
from tests.trainer.parity.made import EOS, drawn, made
from trainer.parity.agreement import EngineResponses, Heads, choices, differences, draw_z, ends, length_figures
from trainer.parity.bounds import Engine, Pass, broken, coarser, margin

ROWS = [[5, 6, EOS], [7, EOS]]
NO_BOS = Heads(bos=None, wanted=0, begun=0, doubled=0, lost=0)


@pytest.fixture(scope="module")
def bounds() -> BoundsConfig:
    return compose("parity", ParityConfig).bounds


def pass_of(answers: EngineResponses, stops: tuple[int, ...] = (EOS,)) -> Pass:
    return Pass(
        answers=len(answers.lengths),
        tokens=len(answers.token_ids),
        tokens_per_second=1.0,
        cached=None,
        lengths=length_figures(answers.lengths),
        differences=differences(answers),
        ends=ends(answers, stops, []),
        agreement=None,
    )


def engine_of(greedy: EngineResponses, sampled: EngineResponses | None = None, z: float | None = None) -> Engine:
    return Engine(
        greedy=pass_of(greedy),
        choices=choices(greedy, 2e-4),
        sampled=pass_of(sampled) if sampled is not None else None,
        draw_z=z,
        start_seconds=1.0,
        sync_seconds=1.0,
        memory_without_bytes=1,
        memory_with_bytes=2,
    )


def lines(bounds: BoundsConfig, engine: Engine, heads: Heads = NO_BOS) -> list[str]:
    return broken({"vllm": engine}, heads, bounds, "float32")


def test_metrics_within_the_bounds_are_not_reported(bounds: BoundsConfig) -> None:
    assert lines(bounds, engine_of(made(ROWS, offset=9e-6, gap=1.9e-4), made(ROWS, offset=-9e-6), z=-4.9)) == []


def test_greedy_token_outside_the_rounding_margin_is_reported(bounds: BoundsConfig) -> None:
    (line,) = lines(bounds, engine_of(made(ROWS, gap=2.1e-4)))
    assert line == (
        "vllm: greedy: 0 of the tokens are the trainer's choice, or at most 0.0002 nats below it: < bounds.token_agreement=1 "
        "(the furthest by 0.00021, row 10, token 0)"
    )
    assert lines(replace(bounds, token_agreement=0.0), engine_of(made(ROWS, gap=2.1e-4))) == []


def test_log_probs_beyond_their_bounds_are_reported_for_either_pass(bounds: BoundsConfig) -> None:
    most, mean = lines(bounds, engine_of(made(ROWS), made(ROWS, offset=2e-4)))
    assert most == (
        "vllm: sampled: a log-prob is 0.0002 off the trainer's: > bounds.log_prob_max.float32=0.0001 (row 10, token 0)"
    ) or most.endswith("(row 10, token 1)")
    assert mean == "vllm: sampled: log-probs are 0.0002 off the trainer's on average: > bounds.log_prob_mean.float32=1e-05"
    assert [line[:13] for line in lines(bounds, engine_of(made(ROWS, offset=2e-4)))] == ["vllm: greedy:"] * 2


def test_nan_exceeds_every_bound(bounds: BoundsConfig) -> None:
    nan = float("nan")
    found = lines(bounds, engine_of(made(ROWS, offset=nan, gap=nan), made(ROWS), z=nan))
    assert ["token_agreement" in found[0], "draw_z" in found[1], "log_prob_max" in found[2], "log_prob_mean" in found[3]] == [
        True
    ] * 4


@pytest.mark.parametrize(("at", "kind"), [(1.0, "too unlikely"), (0.6, "too likely")])
def test_samples_at_another_temperature_are_reported(bounds: BoundsConfig, at: float, kind: str) -> None:
    sampled = drawn(100, from_temperature=at, at_temperature=0.8)
    (line,) = lines(bounds, engine_of(made(ROWS), replace(sampled, finished=sampled.finished), draw_z(sampled)))[:1]
    assert line.startswith(f"vllm: sampled: the samples are {kind} for the trainer's distribution, by ")
    assert line.endswith(" standard errors: > bounds.draw_z=5")


def test_wrong_ends_are_reported(bounds: BoundsConfig) -> None:
    engine = engine_of(made([[5, 6], [5, EOS, 5]], finished=[False, True]))
    (line,) = lines(bounds, engine)
    assert line == (
        "vllm: greedy: answers end wrongly: 1 x it stopped, and not with a stop token; 1 x it continues after a stop token; "
        "1 x it is shorter than it may be, and did not stop: 3 > bounds.wrong_ends=0"
    )
    assert lines(replace(bounds, wrong_ends=3), engine) == []
    alike = engine_of(made([[5, 6], [5, 7]], finished=[True, True]))
    assert lines(replace(bounds, wrong_ends=1), alike) == [
        "vllm: greedy: answers end wrongly: 2 x it stopped, and not with a stop token: 2 > bounds.wrong_ends=1"
    ]


def test_wrong_first_tokens_of_prompts_are_reported(bounds: BoundsConfig) -> None:
    wrong = Heads(bos="<s>", wanted=3, begun=3, doubled=2, lost=1)
    (line,) = lines(bounds, engine_of(made(ROWS)), wrong)
    assert line == (
        "prompts: 2 begin with <s> twice, 1 without it, though it is wanted: 3 > bounds.wrong_prompts=0"
    )  # fmt: skip
    assert lines(replace(bounds, wrong_prompts=3), engine_of(made(ROWS)), wrong) == []


def test_coarser_dtype_sets_the_bound(bounds: BoundsConfig) -> None:
    assert coarser(["float32", "bfloat16"]) == coarser(["bfloat16", "float16"]) == "bfloat16"
    assert coarser(["float64", "float32"]) == "float32" and coarser(["float64", "float64"]) == "float64"
    assert margin(bounds, "float32") == 2 * bounds.log_prob_max.float32
    assert margin(bounds, "bfloat16") == 2 * bounds.log_prob_max.bfloat16
    ordered = [bounds.log_prob_max.of(name) for name in ("float64", "float32", "float16", "bfloat16")]
    assert ordered == sorted(ordered)
