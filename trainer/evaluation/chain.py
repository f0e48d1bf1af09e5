"""Report of an RLHF chain: ``python -m trainer.evaluation.chain FOLDER`` writes FOLDER/report.html and FOLDER/chain.json.

FOLDER is filled by scripts/run_rlhf_chain_cpu.sh. sft, reward and ppo are run directories. sft_answers and policy_answers hold
responses to the same prompts, scored by a rule that knows the truth and by the reward model. The file ``stage`` in each
directory records the inputs of the stage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq

from trainer.evaluation.estimators import Interval, best_of_k, mean_with_interval
from trainer.generation.shards import Row, shard_files
from trainer.report.charts import Chart, Curve, draw
from trainer.report.page import render
from trainer.report.run_report import ACCURACY, Series, series_of
from trainer.run.run_dir import REPORT, read_metrics, write_atomic
from workers.seeding import seed_of

STAGES = ("data", "base", "sft", "pairs", "reward", "ppo", "policy", "sft_answers", "policy_answers")
FIGURES = "chain.json"
TRUTH, MODEL = "acc", "reward_model"
"""Names in a shard's score_parts: the rule's score, and the reward model's."""
RIGHT = 1.0
RESAMPLES = 2000
MOST_MISTAKES = 12


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """Scored responses of one model: P prompts, n responses each. truth, model: scores of rule and reward model, (P, n)."""

    rows: list[Row]
    truth: list[list[float]]
    model: list[list[float]]

    @property
    def n(self) -> int:
        return len(self.truth[0])

    def each(self) -> list[tuple[float, float]]:
        """(truth, model) of every response."""
        return [pair for t, m in zip(self.truth, self.model, strict=True) for pair in zip(t, m, strict=True)]


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """Results of one way to generate responses: mean truth over prompts with its interval, and the reward model's mean score.

    rescaled: the reward model's score on a scale where 0 is the mean over the fine-tuned model's wrong responses and 1 the mean
    over its right ones. It equals the truth if the reward model separates both equally well for all responses.
    """

    name: str
    truth: Interval
    model: float
    rescaled: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the chain. made_from: (first 12 digits of the SHA-256, path below the folder) of input data and weights."""

    name: str
    module: str
    seconds: int
    made_from: list[tuple[str, str]]
    has_report: bool


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong response with a high reward model score."""

    prompt: str
    answer: str
    ground_truth: str
    score: float


def write(folder: Path) -> Path:
    """Write page and figures; returns the page's path. Raises ValueError, one line, without scores or pairs to compare."""
    tuned, policy = read_policy_scores(folder / "sft_answers/answers"), read_policy_scores(folder / "policy_answers/answers")
    accuracy, scale = pair_accuracy(tuned), scale_of(tuned)
    ways = ways_of(tuned, policy, scale)
    ppo, reward = series_of(read_metrics(folder / "ppo")), series_of(read_metrics(folder / "reward"))
    stages = [read_stage(folder, name) for name in STAGES]
    figures = {
        "ways": {way.name: asdict(way) | {"truth": way.truth._asdict()} for way in ways},
        "reward_model_accuracy": accuracy,
        "seconds": sum(stage.seconds for stage in stages),
    }
    write_atomic(folder / FIGURES, json.dumps(figures, indent=1) + "\n")
    page = render(
        "evaluation/chain.html.j2",
        folder=folder.name,
        ways=ways,
        n=tuned.n,
        prompts=len(tuned.truth),
        accuracy=accuracy,
        chosen=best_of_n_charts(tuned, scale),
        learned=learning_charts(series_of(read_metrics(folder / "sft")), reward, ppo, scale),
        mistakes=mistakes_of(policy),
        stages=stages,
        seconds=figures["seconds"],
    )
    write_atomic(folder / REPORT, page)
    return folder / REPORT


def read_policy_scores(answers: Path) -> PolicyScores:
    """Read the shards of a directory. Raises ValueError if any response has no score."""
    rows = [row for path in shard_files(answers) for row in pq.read_table(path).to_pylist()]
    failed = sum(score is None for row in rows for score in row["scores"])
    if failed:
        raise ValueError(f"{answers}: {failed} answers have no score, their rewards failed")
    truth, model = ([[part[name] for part in row["score_parts"]] for row in rows] for name in (TRUTH, MODEL))
    return PolicyScores(rows, truth, model)


Scale = Callable[[float], float]


def scale_of(tuned: PolicyScores) -> Scale:
    """Linear map of reward model scores to Way.rescaled."""
    zero, one = (mean([m for t, m in tuned.each() if (t >= RIGHT) == right]) for right in (False, True))

    def rescaled(score: float) -> float:
        return (score - zero) / (one - zero)

    return rescaled


def ways_of(tuned: PolicyScores, policy: PolicyScores, scale: Scale) -> list[SelectionResult]:
    """Fine-tuned model and PPO policy, each with one response and with best of n; best of n by the truth is the upper bound."""
    ways = []
    for name, scores_of_policy in (("fine-tuned", tuned), ("PPO", policy)):
        for k, label in ((1, name), (scores_of_policy.n, f"{name}, best of {scores_of_policy.n}")):
            ways.append(
                way(
                    label,
                    chosen(scores_of_policy, scores_of_policy.truth, k),
                    chosen(scores_of_policy, scores_of_policy.model, k),
                    scale,
                )
            )
    best = [own.index(max(own)) for own in tuned.truth]
    truth, model = ([own[i] for own, i in zip(of, best, strict=True)] for of in (tuned.truth, tuned.model))
    return [*ways[:2], way(f"fine-tuned, best of {tuned.n} by the truth", truth, model, scale), *ways[2:]]


def chosen(scores_of_policy: PolicyScores, values: Sequence[Sequence[float]], k: int) -> list[float]:
    """Expected value, per prompt, of the response that the reward model selects out of k."""
    return [best_of_k(scores, own, k) for scores, own in zip(scores_of_policy.model, values, strict=True)]


def way(name: str, truth: Sequence[float], model: Sequence[float], scale: Scale) -> SelectionResult:
    score = mean(model)
    # A fixed seed: the same files give the same page.
    return SelectionResult(name, mean_with_interval(truth, RESAMPLES, seed_of(1, "bootstrap")), score, scale(score))


def pair_accuracy(scores_of_policy: PolicyScores) -> float:
    """Share of pairs of a right and a wrong response to the same prompt that the reward model orders correctly; ties count 0.5.

    Raises ValueError if there is no such pair.
    """
    won = [
        0.5 + 0.5 * ((right > wrong) - (right < wrong))
        for truth, model in zip(scores_of_policy.truth, scores_of_policy.model, strict=True)
        for (t, right), (other, wrong) in product(zip(truth, model, strict=True), repeat=2)
        if t >= RIGHT > other
    ]
    if not won:
        raise ValueError("no prompt has a right and a wrong answer of the fine-tuned model: the reward model cannot be judged")
    return mean(won)


def best_of_n_charts(tuned: PolicyScores, scale: Scale) -> list[Chart]:
    ks = [float(k) for k in range(1, tuned.n + 1)]
    truth = [mean(chosen(tuned, tuned.truth, int(k))) for k in ks]
    model = [scale(mean(chosen(tuned, tuned.model, int(k)))) for k in ks]
    return [two_curves("Best of n", "of the fine-tuned model, taken by the reward model", (ks, truth), (ks, model))]


def learning_charts(sft: Series, reward: Series, ppo: Series, scale: Scale) -> list[Chart]:
    by_model = next(values for name, values in ppo.items() if name.startswith("val-aux/") and f"/{MODEL}/" in name)
    steps, scores = by_model
    return [
        two_curves("PPO", "held-out prompts, one answer", ppo[ACCURACY], (steps, [scale(score) for score in scores])),
        draw(
            "Reward model",
            "accuracy, held-out pairs",
            [Curve("pairs", *reward[ACCURACY], exact=True, dots=True)],
            at_least=(0.5, 1.0),
        ),
        draw("Fine-tuning", "loss", [Curve("training", *sft["train/loss"])]),
    ]


Points = tuple[Sequence[float], Sequence[float]]
"""x and y of a curve."""


def two_curves(title: str, note: str, truth: Points, model: Points) -> Chart:
    curves = [
        Curve("true score", *truth, exact=True, dots=True),
        Curve("reward model's, rescaled", *model, exact=True, dots=True),
    ]
    return draw(title, note, curves, at_least=(0.0, 1.0))


def mistakes_of(policy: PolicyScores) -> list[Mistake]:
    """Distinct wrong responses with the highest reward model scores, highest first."""
    found = {}
    for row, truth, model in zip(policy.rows, policy.truth, policy.model, strict=True):
        prompt = row["prompt"][0]["content"]
        for answer, true, score in zip(row["responses"], truth, model, strict=True):
            if true < RIGHT:
                found[prompt, answer] = Mistake(prompt, answer, row["reward_model"]["ground_truth"], score)
    return sorted(found.values(), key=lambda mistake: -mistake.score)[:MOST_MISTAKES]


def read_stage(folder: Path, name: str) -> Stage:
    """Parse a stage file of scripts/run_rlhf_chain_cpu.sh: the command, a line ``<sha256>  <path>`` per file, ``seconds N``."""
    command, *hashes, seconds = (folder / name / "stage").read_text(encoding="utf-8").splitlines()
    files = [line.split("  ", 1) for line in hashes]
    made_from = [(digest[:12], path) for digest, path in files if not path.endswith((".json", ".jinja"))]
    module = command.split()[2]
    return Stage(name, module, int(seconds.split()[1]), made_from, (folder / name / REPORT).exists())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(arguments: Sequence[str]) -> None:
    missing = [name for name in STAGES if len(arguments) != 1 or not (Path(arguments[0]) / name / "stage").exists()]
    if missing:
        raise SystemExit("usage: python -m trainer.evaluation.chain <folder that scripts/run_rlhf_chain_cpu.sh has filled>")
    try:
        path = write(Path(arguments[0]))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    for name, way in json.loads((path.parent / FIGURES).read_text())["ways"].items():
        print(f"{name:40} true score {way['truth']['value']:.3f}   reward model's {way['model']:+.2f}")
    print(f"report: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
