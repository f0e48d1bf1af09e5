"""Generate and score the responses of a step; drop failed rewards and, with dynamic sampling, groups of equal scores."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import RewardConfig
from trainer.agents.sessions.session_flow import AgentSessions, Flow, Session, SessionFlow, agent_metrics
from trainer.algorithms.segments import last_in, sum_rows
from trainer.algorithms.trajectories import Trajectories
from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import Prompt, PromptStream
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.models.reward_models import RewardModels
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.requests import responses_to_score
from trainer.rewards.scoring import Failures, Rewards, Score
from trainer.rewards.shaping import Shaping, missing_eos_penalty, overlong_penalty
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.responses import decode_sessions, in_order, join_responses, prompt_batch, texts_of
from trainer.run.timing import Phases
from workers.batch import Batch, counts_in
from workers.rollout.base import Sampling
from workers.seeding import seed_of

ScoredResponses = tuple[list[Score], Tensor | None]
"""Result of RewardModels.add: scores, and rewards of single tokens (T,) or None."""
Overlap = Callable[[Batch, Callable[[], ScoredResponses]], tuple[ScoredResponses, Batch]]
"""Scores responses while other models compute columns of the same rows: (batch, scoring function) -> (scores, columns)."""


@dataclass(frozen=True, slots=True)
class Requested:
    """Requests of B rows. prompts, samples: of each row. questions: for the engines. each: adjacent rows with the same prompt.

    agents: responses are their sessions.
    """

    prompts: Sequence[Prompt]
    samples: Sequence[int]
    questions: Batch
    each: int
    agents: AgentSessions | None = None

    def requests(self, ids: Sequence[int]) -> Batch:
        return self.questions.select(ids).with_rows(id=torch.tensor(ids))

    def sessions(self, ids: Sequence[int]) -> list[Session]:
        assert self.agents is not None, "sessions are asked for with agents"
        seeds, greedy = (self.questions.rows[name].tolist() for name in ("seed", "greedy"))
        return [self.agents.session(id, self.prompts[id], seeds[id], greedy[id]) for id in ids]


class Source(Protocol):
    """What a flow's ids are: rows of requests (see RolloutRole.advance), and with agents their sessions."""

    def requests(self, ids: Sequence[int]) -> Batch: ...

    def sessions(self, ids: Sequence[int]) -> list[Session]: ...


class BatchPolicy(Protocol):
    """Decides which prompts a step generates responses to, and which of these form its batch. See policies.py and partial.py.

    selects_groups: whether groups may be dropped after scoring.
    """

    selects_groups: bool

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        """Batch of the step, see Sampler.next_batch: scored, without rows whose reward failed, before shaping."""


class Sampler:
    """Generates responses with the current policy, and scores them."""

    def __init__(
        self,
        rollout: RemoteRollout,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        watchdog: Watchdog,
        *,
        n: int,
        sampling: Sampling,
        seed: int,
        policy: BatchPolicy,
        with_baselines: bool,
        reward: RewardConfig,
        shaping: Shaping,
        models: RewardModels | None,
        rollbacks: Rollbacks,
        failures: Failures,
        agents: AgentSessions | None = None,
    ) -> None:
        """n: responses per training prompt. sampling, seed: of training responses. policy: how a step's batch is generated.

        with_baselines: also score a greedy response to each training prompt. reward: penalties of training responses. shaping:
        of their rewards. models: additional reward models. rollbacks: their number enters the seeds of training responses.
        agents: responses are their sessions.
        """
        self.agents = agents
        self.rollout = rollout
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.watchdog = watchdog
        self.n = n
        self.sampling = sampling
        self.seed = seed
        self.policy = policy
        self.with_baselines = with_baselines
        self.reward = reward
        self.shaping = shaping
        self.models = models
        self.rollbacks = rollbacks
        self.failures = failures
        self.left_out: list[Batch] = []
        """Rows dropped by the last ``next_batch`` because their rewards failed."""
        self.sessions: list[Batch] = []
        """Rows of sessions that have finished since the last ``next_batch`` began, also of those that were dropped."""
        self._n_submitted = 0
        self._scored: dict[int, Score] = {}
        """Scores of sessions that have their own reward, by key."""
        self._accurate = set[str]()
        """Data sources whose scores have had ``acc``."""

    def next_batch(self, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None = None) -> Batch:
        """Generate the step's training batch: scored responses, ``n`` per prompt, in the order of the prompts.

        Rows whose reward failed are dropped. Columns in addition to those of ``finish_scoring``:

        tokens: token_level_scores (T,), the shaped reward at the last sampled token, except for rewards of models at others.
        rows: reward (shaped), baseline (with_baselines).
        meta: metrics (reward/failed*, reward/timed_out_share, training/filter_groups/*), generated_tokens (of all rounds).

        overlap: runs while reward models score; ignored if responses are selected by their scores (``selects_groups``).
        Raises ValueError, one line, if every reward failed, and if the batch cannot be filled.
        """
        self.failures.start_step()
        self.left_out, self.sessions = [], []
        batch = self.policy.batch(self, step, prompts, phases, overlap)
        # After filtering: running moments and group statistics are those of the rows that are trained on.
        trajectories = Trajectories.of(batch)
        whole = trajectories.joined(batch).rows
        of_row = trajectories.of_row
        reward, baseline = self.shaping(whole["reward"], whole["group"], whole.get("baseline"))
        reward = reward[of_row]
        if self.agents is not None:
            sessions = [batch.objects["session"][row] for row in trajectories.last.tolist()]
            waited = {"timing_s/agents/waited": self.agents.pool.seconds_waited}
            self.agents.pool.seconds_waited = 0.0
            batch = batch.with_meta({"metrics": batch.meta["metrics"] | agent_metrics(sessions) | waited})
        batch = batch.with_rows(reward=reward, **({} if baseline is None else {"baseline": baseline[of_row]}))
        return batch.with_tokens(token_level_scores=token_rewards(batch, reward))

    def flow(self, sampling: Sampling, source: Source, **options: Any) -> Flow:
        """A flow of responses. options: of RemoteRollout.flow."""
        if self.agents is None:
            return self.rollout.flow(sampling, source.requests, **options)
        of_turns = partial(self.rollout.flow, sampling, **options)
        return SessionFlow(self.agents.pool, source.sessions, of_turns, in_step=self.agents.in_step)

    @property
    def selects_groups(self) -> bool:
        """Whether generated responses may be dropped after scoring; computing columns for them in advance would be wasted."""
        return self.policy.selects_groups or self.with_baselines

    def scored_only(self, answered: Batch) -> Batch:
        """``answered`` without rows whose reward failed, with meta["metrics"]."""
        scored = self.drop_failed(answered)
        check_some_scored(answered, len(scored))
        n_failed = len(Trajectories.of(answered)) - len(Trajectories.of(scored))
        failed = {"reward/failed": n_failed} | self.failures.metrics()
        return scored.with_meta({"metrics": failed | answered.meta.get("metrics", {})})

    def drop_failed(self, batch: Batch) -> Batch:
        """Remove the trajectories whose reward failed and add them to ``left_out``; the result may be empty."""
        trajectories = Trajectories.of(batch)
        failed = batch.rows["reward_failed"][trajectories.last][trajectories.of_row]
        if not failed.any():
            return batch
        self.left_out.append(batch.select(failed.nonzero().flatten()))
        return batch.select((~failed).nonzero().flatten())

    @property
    def may_begin_early(self) -> bool:
        """Whether responses may be generated before it is known that the step needs them, while others are scored."""
        colocated = self.models is not None and self.models.group in self.rollout.groups
        return self.rollout.balance == "tokens" and not colocated  # a colocated reward model has the GPUs while it scores

    def sample_to_train(self, prompts: Sequence[Prompt], step: int, phases: Phases, overlap: Overlap | None = None) -> Batch:
        """Training responses with rows reward (score plus penalties) and, with_baselines, baseline (of the greedy response).

        meta["generated_tokens"]: number of response tokens, including greedy responses.
        """
        requested = self.request_to_train(prompts, "train", step)
        parts = self._generate(requested, self.sampling, phases)
        return self.finish_training_batch(parts, requested, step, phases, overlap)

    def request_to_train(self, prompts: Sequence[Prompt], purpose: str, step: int) -> Requested:
        """Requests of training responses; with_baselines, each group has a greedy response as sample n."""
        return self._request(prompts, self.n, self.n + self.with_baselines, self.rollbacks.purpose(purpose), step)

    def finish_training_batch(
        self, parts: Sequence[Batch], requested: Requested, step: int, phases: Phases, overlap: Overlap | None = None
    ) -> Batch:
        """Wait for the scores of ``parts``, what ``submit_rows`` returned; returns what ``sample_to_train`` does."""
        batch = in_order(parts).with_meta({"temperature": self.sampling.divisor})
        batch = self.finish_scoring(
            batch, requested.prompts, requested.samples, phases, n=self.n, step=step, trains=True, overlap=overlap
        )
        # Counted before baselines are split off, which took time to generate too.
        generated = int(batch.tokens["response_mask"].count_nonzero())
        return self.with_penalties(batch).with_meta({"generated_tokens": generated})

    def with_penalties(self, batch: Batch) -> Batch:
        """Add rows reward (score plus penalties) and, with_baselines, baseline (of the greedy response, which is removed)."""
        trajectories = Trajectories.of(batch)
        whole = trajectories.joined(batch)
        penalty = overlong_penalty(counts_in(whole.tokens["response_mask"], whole.lengths), self.reward.reward_kwargs)
        penalty = penalty[trajectories.of_row]
        if self.reward.reward_kwargs.overlong_buffer_cfg.log:
            batch.objects["reward_extra"] = [
                extra | {"overlong_reward": value, "overlong": float(value < 0)}
                for extra, value in zip(batch.objects["reward_extra"], penalty.tolist(), strict=True)
            ]
        penalty = penalty + missing_eos_penalty(whole.rows["finished"], self.reward.missing_eos_penalty)[trajectories.of_row]
        batch = batch.with_rows(reward=batch.rows["score"] + penalty)
        # After the penalties: a baseline is the reward of the greedy response, penalties included.
        return split_baselines(batch, self.n) if self.with_baselines else batch

    def generate_and_score(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, phases: Phases, *, purpose: str, step: int
    ) -> Batch:
        """Generate and score ``n`` responses per prompt that are not trained on. B = n * len(prompts) rows, responses to a prompt
        adjacent.

        purpose: part of the seed, separates responses with the same step, prompt and sample.
        Returns what ``finish_scoring`` does.
        """
        requested = self._request(prompts, n, n, purpose, step)
        parts = self._generate(requested, sampling, phases)
        batch = in_order(parts).with_meta({"temperature": sampling.divisor})
        return self.finish_scoring(
            batch, requested.prompts, requested.samples, phases, n=n, step=step, trains=False, overlap=None
        )

    def _request(self, prompts: Sequence[Prompt], n: int, each: int, purpose: str, step: int) -> Requested:
        """Requests of ``each`` responses per prompt; those from sample ``n`` on are greedy."""
        asked = [prompt for prompt in prompts for _ in range(each)]
        samples = list(range(each)) * len(prompts)
        # One seed per response, from values that do not depend on batching, engines or ranks.
        seeds = [seed_of(self.seed, purpose, step, prompt.uid, sample) for prompt, sample in zip(asked, samples, strict=True)]
        return Requested(asked, samples, prompt_batch(asked, seeds, greedy=torch.tensor(samples) == n), each, self.agents)

    def _generate(self, requested: Requested, sampling: Sampling, phases: Phases) -> list[Batch]:
        """Generate all responses and submit them for scoring as they end; returns what ``submit_rows`` does."""
        questions, each = requested.questions, requested.each
        with phases("gen"):
            flow = self.flow(sampling, requested, expected=len(questions))
            for first in range(0, len(questions), each):
                flow.admit(range(first, first + each), int(questions.lengths[first]))
            ended, submitted = list[Batch](), list[Batch]()
            while flow.start():
                # Decoded and scored while the engines generate the next tick.
                submitted += [self.submit_rows(part, requested) for part in ended]
                ended = flow.wait()
            return submitted + [self.submit_rows(part, requested) for part in ended]

    def finish_scoring(
        self,
        batch: Batch,
        asked: Sequence[Prompt],
        samples: Sequence[int],
        phases: Phases,
        *,
        n: int,
        step: int,
        trains: bool,
        overlap: Overlap | None,
        known: Container[int] = (),
    ) -> Batch:
        """Wait for the scores of submitted responses, and add those of reward models.

        batch: what ``submit`` returned, ``in_order``; rows["id"] are places in ``asked`` and ``samples`` (B). n: samples before
        the greedy one. trains: scores update the running moments of reward models, except those of groups in ``known``
        (ordinals), which have. overlap: see ``next_batch``; its columns are added.

        Returns a batch with these columns:
        tokens: input_ids, response_mask, rollout_log_probs, weight_version; model_rewards if a model scores single tokens.
        rows: uid, group, sample, trajectory, part, prompt_length, score, finished, reward_failed. group: the prompt's ordinal;
            for prompts that are not from a PromptStream, the index in ``prompts``. trajectory: number of the response in the run,
            as in GroupBuffer; part: of its rows.
        objects: prompt, response, ground_truth, data_source, reward_extra, reward_error.
        """
        with phases("reward"), self.watchdog.own("reward", "scoring", f"{len(asked)} answers"):
            scores = self._finish(batch.rows["score_key"].tolist())
        of_row: list[int] = batch.rows["id"].tolist()
        if len(batch) > len(asked):  # sessions of several rows
            asked, samples = [asked[i] for i in of_row], [samples[i] for i in of_row]
        del batch.rows["id"], batch.rows["score_key"]
        texts: list[str] = batch.objects.pop("response")
        scores = self._with_timeout_scores(scores, asked)
        if self.models is not None:
            # Neither greedy responses nor validation may change the moments that normalise training scores.
            learns = [sample < n and prompt.ordinal not in known for prompt, sample in zip(asked, samples, strict=True)]
            learn_from = torch.tensor(learns) if trains else None
            of_session = batch.with_rows(trajectory=torch.tensor(of_row))
            judge = partial(self._score_by_models, self.models, scores, of_session, asked, texts, learn_from, phases)
            (scores, at_tokens), columns = (judge(), Batch(batch.lengths)) if overlap is None else overlap(batch, judge)
            # A colocated engine sleeps while the reward model works; it gets its weights again before the next generation.
            self.rollout.rest(self.models.group)
            batch |= columns
            batch = batch if at_tokens is None else batch.with_tokens(model_rewards=at_tokens)
            # Again: reward models on servers can time out as well.
            scores = self._with_timeout_scores(scores, asked)
        ordinals = torch.tensor([prompt.ordinal for prompt in asked])
        # Responses to a prompt are adjacent, from sample 0.
        indices = torch.tensor(of_row) // (max(samples) + 1)
        groups = torch.where(ordinals < 0, indices, ordinals)
        # A session has one score, whatever the number of its rows.
        of_responses = [scores[i] for i in Trajectories.of(batch.with_rows(trajectory=torch.tensor(of_row))).last.tolist()]
        self.failures.add(step, "training" if trains else "validation", of_responses)
        score = torch.tensor([0.0 if item.value is None else item.value for item in scores])
        batch.rows |= {
            "uid": torch.tensor([prompt.uid for prompt in asked]),
            "group": groups,
            "sample": torch.tensor(samples),
            # The greedy response of a baseline has a number too.
            "trajectory": groups * (n + (trains and self.with_baselines)) + torch.tensor(samples),
            "part": batch.rows.get("part", torch.zeros_like(groups)),
            "score": score,
            "reward_failed": torch.tensor([item.value is None for item in scores]),
        }
        batch.objects |= describe(asked, texts, scores)
        return batch

    def submit_rows(self, answers: Batch, requested: Requested) -> Batch:
        """Submit responses to rows of ``requested``, rows["id"]; see ``submit``."""
        ids = answers.rows["id"].tolist()
        return self.submit(answers, requested.questions.select(ids), [requested.prompts[id] for id in ids])

    def submit(self, answers: Batch, questions: Batch, asked: Sequence[Prompt]) -> Batch:
        """Submit responses for scoring, while others are generated; returns them with their prompts and objects["response"].

        answers: as engines return them. questions, asked: the prompt of each. Adds rows["score_key"], the keys of their scores.
        """
        if self.agents is not None:
            return self._submit_sessions(answers, asked)
        texts = texts_of(answers, self.tokenizer)
        batch = join_responses(questions, answers)
        by_servers = isinstance(self.rewards, RemoteRewards)
        requests = responses_to_score(asked, texts, batch, self.tokenizer, for_servers=by_servers)
        keys = self._keys(len(answers))
        self.rewards.submit(requests, keys)
        return Batch(batch.lengths, batch.tokens, batch.rows | {"score_key": torch.tensor(keys)}, {"response": texts})

    def _keys(self, n: int) -> range:
        # Unique in the run: scores of a later batch may be outstanding while those of a validation are collected.
        self._n_submitted += n
        return range(self._n_submitted - n, self._n_submitted)

    def _submit_sessions(self, rows: Batch, asked: Sequence[Prompt]) -> Batch:
        """As ``submit``, for rows of sessions, which have their prompts. asked: the prompt of each row.

        A session is scored once, by its text after the first prompt, which is that of its last row. One with a reward has that;
        the reward of one that ended with an error has failed.
        """
        self.sessions.append(rows)
        texts, sessions = decode_sessions(rows, self.tokenizer), rows.objects["session"]
        trajectories = Trajectories.of(rows.with_rows(trajectory=rows.rows["id"]))
        last, keys = trajectories.last.tolist(), self._keys(len(trajectories))
        for row, key in zip(last, keys, strict=True):
            reward, error = sessions[row]["reward"], sessions[row]["extra"].get("error")
            if reward is not None or error is not None:
                self._scored[key] = Score(None if error else reward, {}, error)
        to_score = {key: row for row, key in zip(last, keys, strict=True) if key not in self._scored}
        at = list(to_score.values())
        scored = rows.select(at)
        prompts = []
        for row, ids, length in zip(at, scored.split_rows("input_ids"), scored.rows["prompt_length"].tolist(), strict=True):
            # The prompt that the session rendered, which has the tools: the dataset's is shorter.
            prompt_ids, extra = ids[:length].tolist(), asked[row].extra_info | sessions[row]["extra"]
            text = self.tokenizer.decode(prompt_ids)
            prompts.append(replace(asked[row], prompt_ids=tuple(prompt_ids), text=text, extra_info=extra))
        by_servers = isinstance(self.rewards, RemoteRewards)
        requests = responses_to_score(prompts, [texts[row] for row in at], scored, self.tokenizer, for_servers=by_servers)
        self.rewards.submit(requests, list(to_score))
        key_of_row = torch.tensor(keys)[trajectories.of_row]
        return Batch(rows.lengths, rows.tokens, rows.rows | {"score_key": key_of_row}, {"response": texts, "session": sessions})

    def _finish(self, keys: Sequence[int]) -> list[Score]:
        """Wait for the scores of rows; rows of a session have the same key."""
        unknown = [key for key in dict.fromkeys(keys) if key not in self._scored]
        scores = dict(zip(unknown, self.rewards.finish(unknown), strict=True))
        scores |= {key: self._scored.pop(key) for key in {*keys} - scores.keys()}
        return [scores[key] for key in keys]

    def _with_timeout_scores(self, scores: Sequence[Score], asked: Sequence[Prompt]) -> list[Score]:
        """Replace the missing value of scores that timed out by ``reward.timeout_score``.

        Where scores of its data source have ``acc``, which decides groups and validation, it has 0.
        """
        late = self.reward.timeout_score
        if late is None:
            return list(scores)
        self._accurate |= {prompt.data_source for prompt, score in zip(asked, scores, strict=True) if "acc" in score.extra}
        # A rule's acc stays if the model of a server was late.
        return [
            replace(score, value=late, extra=({"acc": 0.0} if prompt.data_source in self._accurate else {}) | score.extra)
            if score.timed_out and score.value is None
            else score
            for prompt, score in zip(asked, scores, strict=True)
        ]

    @staticmethod
    def _score_by_models(
        models: RewardModels,
        rules: list[Score],
        answers: Batch,
        asked: Sequence[Prompt],
        texts: list[str],
        learn_from: Tensor | None,
        phases: Phases,
    ) -> ScoredResponses:
        """Add the reward models' scores to the rules' scores (B); see RewardModels.add. Of a session they read the last row."""
        trajectories = Trajectories.of(answers)
        last = trajectories.last.tolist()
        with phases("reward_model"):
            scores, of_last = models.add(
                [rules[i] for i in last],
                answers.select(trajectories.last),
                [asked[i] for i in last],
                [texts[i] for i in last],
                learn_from=None if learn_from is None else learn_from[trajectories.last],
            )
        at_tokens = None
        if of_last is not None:
            # Rows of a session are adjacent, so the last ones are in the order of the sessions.
            is_last = torch.zeros(len(answers), dtype=torch.bool).index_fill(0, trajectories.last, True)
            at_tokens = torch.zeros(answers.total_tokens)
            at_tokens[is_last.repeat_interleave(answers.lengths)] = of_last
        return [scores[i] for i in trajectories.of_row.tolist()], at_tokens


def token_rewards(batch: Batch, reward: Tensor) -> Tensor:
    """Distribute ``reward`` (B,) over tokens (T,): model_rewards at their tokens, the remainder at the last sampled token.

    A trajectory of several rows has its reward once, that of its last part. The last token of a row may be an observation, whose
    reward no estimator that works by token would read.
    """
    trajectories = Trajectories.of(batch)
    whole = trajectories.joined(batch)
    # The remainder keeps each sum equal to the reward, whatever penalties and shaping have changed since scoring.
    rest, given = reward[trajectories.last], whole.tokens.get("model_rewards")
    found = torch.zeros(whole.total_tokens) if given is None else given.clone()
    last = whole.offsets[:-1] + last_in(whole.tokens["response_mask"], whole.lengths)
    found[last] += rest if given is None else rest - sum_rows(given, whole.lengths).float()
    return trajectories.split(found)


def describe(asked: Sequence[Prompt], texts: Sequence[str], scores: Sequence[Score]) -> dict[str, list]:
    """Object columns for logs and dumps, one entry per row."""
    return {
        "prompt": [prompt.text for prompt in asked],
        "response": list(texts),
        "ground_truth": [prompt.ground_truth for prompt in asked],
        "data_source": [prompt.data_source for prompt in asked],
        "reward_extra": [score.extra for score in scores],
        "reward_error": [score.error for score in scores],
    }


def split_baselines(batch: Batch, n: int) -> Batch:
    """Remove the greedy responses (sample n of each prompt); their rewards become rows["baseline"] (B,) of the remaining rows.

    If the reward of a greedy response failed, its group's rewards count as failed too: they have no baseline.
    """
    is_greedy = batch.rows["sample"] == n
    greedy = batch.select(is_greedy.nonzero().flatten())
    greedy = Trajectories.of(greedy).joined(greedy)
    samples = batch.select((~is_greedy).nonzero().flatten())
    groups, order = greedy.rows["group"].sort()
    of_row = order[torch.searchsorted(groups, samples.rows["group"])]
    errors = [greedy.objects["reward_error"][i] for i in of_row.tolist()]
    samples.objects["reward_error"] = [
        error if error is not None or baseline_error is None else f"of the greedy answer: {baseline_error}"
        for error, baseline_error in zip(samples.objects["reward_error"], errors, strict=True)
    ]
    failed = samples.rows["reward_failed"] | greedy.rows["reward_failed"][of_row]
    return samples.with_rows(baseline=greedy.rows["reward"][of_row], reward_failed=failed)


def check_some_scored(answered: Batch, n_scored: int) -> None:
    """Raises ValueError, with the first error in ``answered``, if no response of the step has a score so far."""
    if not n_scored:
        first = next(error for error in answered.objects["reward_error"] if error is not None)
        raise ValueError(f"all {len(answered)} rewards of the step failed; the first: {first}")
