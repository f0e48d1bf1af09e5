"""Training-health alarms: each rule measures a step's metrics and fires when its value stays beyond a bound for several steps.

A rule (``AlarmRule``) turns the metrics of a step and a memory of earlier ones into a single number. ``Alarms`` compares that
number with the configured bound and counts consecutive steps beyond it; ``alarms.<name>.patience`` of them fire the alarm.

The memory contains numbers only and is saved in every checkpoint, so a resumed run fires at the same steps as an uninterrupted
one. What a rule measures does not depend on its configured action, bound or patience: a resumed run may change these. Values that
are NaN or infinite are not measured. Updates with such a loss are skipped (skipped_updates.py), which the rule nonfinite counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from configs.schema.alarms import AlarmConfig, SFTAlarmsConfig
from configs.schema.ppo import PPOConfig
from trainer.run.errors import CheckFailed
from trainer.run.events import Events

WINDOW = 20
"""Number of steps in the running median, which stands for the usual value."""
MEAN = 10
"""Number of steps in the running mean; fewer steps give no measurement."""
SCORE = "critic/score"
CUT = "response_length/clip_ratio"
HELD_OUT = "val/accuracy"
END_TOKENS = "rollout/end_tokens"
SKIPPED_IN_A_ROW = "training/skipped_in_a_row"
NO_END_TOKEN = (
    "tokenizer, config.json and generation_config.json name no end token that the model can write, so every answer runs to "
    "data.max_response_length: set eos_token in the tokenizer_config.json and eos_token_id in the generation_config.json"
)
NOISE = 3.0
"""Standard errors of the held-out score below which a fall counts as noise."""

Metrics = Mapping[str, float]


@dataclass(slots=True)
class AlarmMemory:
    """Earlier values of metrics. It is saved as JSON, so it holds only lists and dictionaries of numbers.

    recent: the last WINDOW values of each metric, newest last. extremes: largest and smallest value so far of a metric, or of its
    running mean.
    """

    recent: dict[str, list[float]] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def running_mean(self, name: str, value: float) -> float | None:
        """Append ``value`` and return the mean of the last MEAN values; None if there are fewer."""
        self._append(name, value)
        values = self.recent[name][-MEAN:]
        return fmean(values) if len(values) == MEAN else None

    def over_median(self, name: str, value: float) -> float | None:
        """Append ``value`` and return its ratio to the median of earlier positive values; None if these are fewer than MEAN."""
        # Zeros are excluded: a gradient is 0 if all responses of each group have the same score. With many such steps the median
        # would be 0 or tiny, and the next ordinary gradient would look like a spike.
        before = [other for other in self.recent.get(name, []) if other > 0]
        self._append(name, value)
        return value / median(before) if len(before) >= MEAN else None

    def highest(self, name: str, value: float) -> float:
        """Largest value of ``name`` so far, ``value`` included."""
        self.extremes[f"{name} max"] = max(value, self.extremes.get(f"{name} max", value))
        return self.extremes[f"{name} max"]

    def lowest(self, name: str, value: float) -> float:
        """Smallest value of ``name`` so far, ``value`` included."""
        self.extremes[f"{name} min"] = min(value, self.extremes.get(f"{name} min", value))
        return self.extremes[f"{name} min"]

    def _append(self, name: str, value: float) -> None:
        self.recent[name] = [*self.recent.get(name, []), value][-WINDOW:]


Measure = Callable[[AlarmMemory, Metrics], float | None]
"""(memory, finite metrics of a step) -> value of the rule, None if the step has nothing to measure. Updates the memory."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """A rule that turns metrics into a number to compare with a bound.

    name: key below ``alarms`` in the configuration. measured: description of the number in a message. advice: what to check or
    change, in the same message. below: fires below the bound instead of above it. steps: number of steps that enter the number;
    a rollback has to precede all of them. by_clock: the number depends on the clock, so its counts are in no checkpoint.
    """

    name: str
    measure: Measure
    measured: str
    advice: str
    below: bool = False
    steps: int = 1
    by_clock: bool = False


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that has fired. healthy_until: the last step before all those that entered its measurements."""

    action: Literal["warn", "stop", "rollback"]
    text: str
    healthy_until: int


class Alarms:
    """All rules of a run with their counts.

    beyond: {rule: number of consecutive steps beyond the bound}. since: {rule: first of these steps}.
    """

    def __init__(self, rules: Sequence[tuple[AlarmRule, AlarmConfig]]) -> None:
        self.rules = rules
        self.memory = AlarmMemory()
        self.beyond: dict[str, int] = {}
        self.since: dict[str, int] = {}

    def evaluate(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Evaluate all rules and return the alarms that fire at ``step``.

        A warning fires once, at the ``patience``-th consecutive step beyond the bound, and again only after the value has been
        within the bound. Stop and rollback fire at each further step, too. A step without a measurement keeps the count.
        """
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        fired = []
        for rule, config in self.rules:
            value = rule.measure(self.memory, finite)
            if value is None:
                continue
            if not is_beyond(value, config.bound, rule.below):
                self.beyond[rule.name] = 0
                continue
            self.beyond[rule.name] = count = self.beyond.get(rule.name, 0) + 1
            if count == 1:
                self.since[rule.name] = step
            # Beyond patience too, where the run must act: a resumed run may have changed the action from warn to stop.
            if count == config.patience or (count > config.patience and config.action != "warn"):
                fired += self._alarm(rule, config, value, count)
        return fired

    def _alarm(self, rule: AlarmRule, config: AlarmConfig, value: float, count: int) -> list[Alarm]:
        if config.action == "off":
            return []
        side = "below" if rule.below else "above"
        steps = f" for {count} steps" if count > 1 else ""
        text = (
            f"{rule.name}: {rule.measured} is {value:.3g}, {side} alarms.{rule.name}.bound={config.bound:g}{steps}: {rule.advice}"
        )
        # The first value beyond the bound was made of the ``steps`` steps up to ``since``, so all of these are suspect.
        return [Alarm(config.action, text, self.since[rule.name] - rule.steps)]

    def state(self) -> dict[str, Any]:
        # Checkpoints of runs that are repeated are equal.
        by_clock = {rule.name for rule, _ in self.rules if rule.by_clock}
        beyond, since = ({name: n for name, n in of.items() if name not in by_clock} for of in (self.beyond, self.since))
        return {"memory": asdict(self.memory), "beyond": beyond, "since": since}

    def load(self, state: dict[str, Any]) -> None:
        self.memory = AlarmMemory(**state["memory"])
        self.beyond, self.since = state["beyond"], state["since"]


def is_beyond(value: float, bound: float | None, below: bool) -> bool:
    """Whether ``value`` is on the wrong side of ``bound``; never for None, which disables a rule."""
    return bound is not None and (value < bound if below else value > bound)


def react(alarms: Sequence[Alarm], events: Events, step: int) -> Alarm | None:
    """Report all alarms as events and return the first that requests a rollback. Raises CheckFailed if one requests a stop."""
    # All events first: CheckFailed ends the loop, and later alarms of this step would not be recorded.
    for alarm in alarms:
        events.add(step, "alarm", alarm.text)
    for alarm in alarms:
        if alarm.action == "stop":
            raise CheckFailed(f"stopped at step {step} by an alarm: {alarm.text}")
    return next((alarm for alarm in alarms if alarm.action == "rollback"), None)


def level(*names: str) -> Measure:
    """A measure: absolute value of the first of these metrics that the step has."""

    def measure(memory: AlarmMemory, metrics: Metrics) -> float | None:
        return next((abs(metrics[name]) for name in names if name in metrics), None)

    return measure


def highest(*names: str) -> Measure:
    """A measure: the largest of these metrics, of those that the step has."""

    def measure(memory: AlarmMemory, metrics: Metrics) -> float | None:
        return max((metrics[name] for name in names if name in metrics), default=None)

    return measure


def lost_score(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """Fall of the running mean score from its best value, as a fraction of the range of all scores so far.

    The range makes the bound independent of the units of the reward.
    """
    if not {f"{SCORE}/mean", f"{SCORE}/max", f"{SCORE}/min"} <= metrics.keys():
        return None
    best_answer = memory.highest(SCORE, metrics[f"{SCORE}/max"])
    span = best_answer - memory.lowest(SCORE, metrics[f"{SCORE}/min"])
    # Each metric enters the memory at every step, also where the result is None: a later step compares with it.
    mean = memory.running_mean(f"{SCORE}/mean", metrics[f"{SCORE}/mean"])
    if mean is None or not span:
        return None
    return (memory.highest(f"{SCORE}/mean", mean) - mean) / span


def more_cut(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """Rise of the running mean fraction of truncated responses above its smallest value."""
    if CUT not in metrics:
        return None
    mean = memory.running_mean(CUT, metrics[CUT])
    return None if mean is None else mean - memory.lowest(CUT, mean)


def gradient_spike(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """Gradient norm over its median; the larger ratio of actor and critic."""
    found = [memory.over_median(name, metrics[name]) for name in ("actor/grad_norm", "critic/grad_norm") if name in metrics]
    return max((ratio for ratio in found if ratio is not None), default=None)


def length_spike(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """Mean response length over its median."""
    name = "response_length/mean"
    return memory.over_median(name, metrics[name]) if name in metrics else None


def fallen_held_out(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """Fall of the held-out score from its best value, as a fraction of the best; 0 within NOISE standard errors.

    Both are taken above the lowest score of any problem so far: scores of a reward model have no natural zero.
    """
    names = (HELD_OUT, f"{HELD_OUT}_std", f"{HELD_OUT}_min", "val/problems")
    if not metrics.keys() >= set(names):
        return None
    score, std, least, problems = (metrics[name] for name in names)
    best, floor = memory.highest(HELD_OUT, score), memory.lowest(HELD_OUT, least)
    # Standard error of a mean over ``problems`` scores, from the largest deviation so far: at an accuracy of 0 or 1 the current
    # deviation is 0, and any fall would count.
    noise = NOISE * memory.highest(f"{HELD_OUT}_std", std) / max(problems, 1.0) ** 0.5
    return (best - score) / (best - floor) if best - score > noise and best > floor else 0.0


def motion(memory: AlarmMemory, metrics: Metrics) -> float | None:
    """The larger of |mean score| and the actor's gradient norm: near 0 only if no response scores and nothing is learnt."""
    names = (f"{SCORE}/mean", "actor/grad_norm")
    return max(abs(metrics[name]) for name in names) if metrics.keys() >= set(names) else None


NONFINITE = AlarmRule(
    "nonfinite",
    lambda memory, metrics: metrics.get(SKIPPED_IN_A_ROW, 0.0),
    SKIPPED_IN_A_ROW,
    "loss or gradient is not finite: see the batches in logs/nonfinite/; a smaller optim.lr, or float32 for what overflows",
)
REWARD = AlarmRule(
    "reward",
    lost_score,
    f"the fall of {SCORE}/mean over {MEAN} steps from its best, in parts of the range of all scores,",
    "see the answers (trainer.rollout_data_dir) and the reward function; a smaller actor.optim.lr, or a KL, holds the policy",
    steps=MEAN,
)
ENTROPY = AlarmRule(
    "entropy",
    level("actor/entropy"),
    "actor/entropy",
    "all answers to a prompt are alike: raise actor.entropy_coeff or actor.clip_ratio_high, or lower actor.optim.lr",
    below=True,
)
POLICY_KL = AlarmRule(
    "policy_kl",
    level("actor/ppo_kl"),
    "|actor/ppo_kl|",
    "a step moves the policy too far: lower actor.optim.lr, actor.ppo_epochs or actor.clip_ratio",
)
MISMATCH = AlarmRule(
    "mismatch",
    level("training/rollout_log_probs_diff_mean"),
    "training/rollout_log_probs_diff_mean",
    "trainer and rollout differ (algorithm.rollout_correction.mismatch_bound): unlike precision or kernels, or other weights",
)
GRAD_NORM = AlarmRule(
    "grad_norm",
    gradient_spike,
    f"grad_norm over its median of {WINDOW} steps",
    "see the step's answers and advantages; lower grad_clip or optim.lr",
)
LENGTH = AlarmRule(
    "length",
    length_spike,
    f"response_length/mean over its median of {WINDOW} steps",
    "see the answers: does the reward pay for length? reward.reward_kwargs.overlong_buffer_cfg takes it off",
)
CLIP_RATIO = AlarmRule(
    "clip_ratio",
    more_cut,
    f"the rise of {CUT} over {MEAN} steps from its least",
    "answers are cut at data.max_response_length: see whether they still end; algorithm.truncated_answers=mask",
    steps=MEAN,
)
FAILED_REWARDS = AlarmRule(
    "failed_rewards",
    level("reward/failed_share"),
    "reward/failed_share",
    "the first causes are events of kind reward; these answers are left out, so that the score does not show them: fix the "
    "reward function, raise reward.timeout, or give late ones a score (reward.timeout_score)",
)
ZERO_SIGNAL = AlarmRule(
    "zero_signal",
    level("training/zero_signal_groups"),
    "training/zero_signal_groups",
    "in nearly all groups every answer gets the same reward, so that nothing is learnt: other data, partial credit, a larger "
    "rollout.n, or algorithm.filter_groups.enable=true",
)
NO_LEARNING = AlarmRule(
    "no_learning",
    motion,
    f"the larger of |{SCORE}/mean| and actor/grad_norm",
    "no answer is right and no gradient is left: see the answers (report.html); an easier task, a warm start (trainer.main_sft), "
    "or, if they were right before, a smaller actor.optim.lr and an earlier checkpoint",
    below=True,
)
VALIDATION = AlarmRule(
    "validation",
    fallen_held_out,
    f"the fall of {HELD_OUT} from its best, in parts of the best,",
    "the policy has lost what it could do, or learns to please the reward alone: see the held-out answers; trainer.best_metric "
    f"keeps the best checkpoint ({HELD_OUT}); a smaller actor.optim.lr, or a KL, holds the policy",
)
TRUNCATED = AlarmRule(
    "truncated",
    level(CUT),
    CUT,
    "nearly no answer ends before data.max_response_length: see whether they are whole, whether the end token is the right one; "
    "raise data.max_response_length",
)
END_TOKEN = AlarmRule(
    "end_token", level(END_TOKENS), "the number of end tokens that the model can write", NO_END_TOKEN, below=True
)

STALENESS = AlarmRule(
    "staleness",
    level("rollout/staleness/mean"),
    "rollout/staleness/mean",
    "tokens are of old weights: lower async_training.max_staleness (async) or max_age (partial), or keep fewer groups in flight "
    "(async_training.oversubmit)",
)
IDLE = AlarmRule(
    "idle",
    highest("perf/rollout_idle", "perf/trainer_idle"),
    "the larger of perf/rollout_idle and perf/trainer_idle",
    "one pool waits for the other: move GPUs to the pool that is waited for (placement.pools); so that a few long responses do "
    "not hold up a batch, use async_training.mode=async with a larger max_staleness and oversubmit",
    by_clock=True,
)


def ref_kl(config: PPOConfig) -> AlarmRule:
    """The rule for the KL to the reference, in nats per token.

    A KL in the reward is always logged in that unit. A KL in the loss is used only if loss_agg_mode makes it a mean over tokens;
    in the other modes it has another scale, for which the bound has no meaning.
    """
    in_the_loss = config.actor_rollout_ref.actor.loss_agg_mode in ("token-mean", "seq-mean-token-mean")
    return AlarmRule(
        "ref_kl",
        level("actor/reward_kl_penalty", *(["actor/kl_loss"] if in_the_loss else [])),
        "the KL to the reference",
        "see whether the answers still make sense; raise actor.kl_loss_coef or algorithm.kl_ctrl.kl_coef",
    )


def ppo_alarms(config: PPOConfig) -> Alarms:
    """All rules of a PPO run. With rollout.ignore_eos no response ends by itself, so the two rules about ends are left out."""
    alarms, ends = config.alarms, not config.actor_rollout_ref.rollout.ignore_eos
    return Alarms(
        [
            (NONFINITE, alarms.nonfinite),
            (REWARD, alarms.reward),
            (ENTROPY, alarms.entropy),
            (POLICY_KL, alarms.policy_kl),
            (ref_kl(config), alarms.ref_kl),
            (MISMATCH, alarms.mismatch),
            (GRAD_NORM, alarms.grad_norm),
            (LENGTH, alarms.length),
            (CLIP_RATIO, alarms.clip_ratio),
            (FAILED_REWARDS, alarms.failed_rewards),
            (ZERO_SIGNAL, alarms.zero_signal),
            (NO_LEARNING, alarms.no_learning),
            (VALIDATION, alarms.validation),
            (STALENESS, alarms.staleness),
            (IDLE, alarms.idle),
            *([(TRUNCATED, alarms.truncated), (END_TOKEN, alarms.end_token)] if ends else []),
        ]
    )


def sft_alarms(config: SFTAlarmsConfig) -> Alarms:
    """The rules of a supervised run."""
    return Alarms([(NONFINITE, config.nonfinite)])
