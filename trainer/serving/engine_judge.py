"""Generative judge on a colocated rollout engine: reward.judge without an external server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import JudgeRewardConfig
from configs.schema.serve_reward import ServeRewardConfig
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer, stop_token_ids
from trainer.data.encoding import encode
from trainer.rewards.rules.judge import JudgeError, parse, prompt
from trainer.rewards.scoring import Response, Score
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.responses import decode_responses
from trainer.rollout.rollout_builder import start_engine
from workers.batch import Batch
from workers.controller.group import WorkerGroup
from workers.rollout.base import RolloutSpec, Sampling
from workers.seeding import seed_of


class EngineJudge:
    """Scores responses by prompting a language model and parsing its reply."""

    def __init__(
        self,
        rollout: RemoteRollout,
        tokenizer: PreTrainedTokenizerBase,
        config: JudgeRewardConfig,
        sampling: Sampling,
        *,
        template_kwargs: dict[str, Any],
        longest: int,
        seed: int,
    ) -> None:
        """longest: maximum tokens of a judge prompt. seed: of the judge's replies; equal prompts get equal replies."""
        self._rollout = rollout
        self._tokenizer = tokenizer
        self._config = config
        self._sampling = sampling
        self._template_kwargs = template_kwargs
        self._longest = longest
        self._seed = seed

    def score(self, answers: Sequence[Response]) -> list[Score]:
        """One score per response, parsed from the judge's reply (see trainer.rewards.rules.judge.parse), or an error."""
        asked = [self._question(answer) for answer in answers]
        rows = [ids for ids in asked if not isinstance(ids, str)]
        replies = iter(self._replies(rows) if rows else ())
        return [Score(None, {}, ids) if isinstance(ids, str) else self._read(next(replies)) for ids in asked]

    def _question(self, answer: Response) -> torch.Tensor | str:
        """Token ids of reward.judge.prompt, filled in, as a user message: int64 (n,); or the reason why there are none."""
        fields = {"question": answer.prompt} | answer.extra_info
        text = prompt(self._config.prompt, answer.solution_str, answer.ground_truth, fields)
        ((_, ids),) = encode(self._tokenizer, [[{"role": "user", "content": text}]], self._template_kwargs)
        if len(ids) > self._longest:
            return f"the judge's prompt has {len(ids)} tokens, judge_engine.max_prompt_length is {self._longest}"
        return torch.from_numpy(ids).long()

    def _replies(self, rows: Sequence[torch.Tensor]) -> list[str]:
        questions = Batch(
            lengths=torch.tensor([len(ids) for ids in rows]),
            tokens={"input_ids": torch.cat(list(rows))},
            rows={
                # A function of the prompt alone: a reply does not depend on the batch that a request happens to be in.
                "seed": torch.tensor([seed_of(self._seed, "judge", str(ids.tolist())) for ids in rows]),
                "greedy": torch.zeros(len(rows), dtype=torch.bool),  # temperature 0 is greedy regardless
            },
        )
        return decode_responses(self._rollout.generate(questions, self._sampling, 1), self._tokenizer)

    def _read(self, reply: str) -> Score:
        try:
            return Score(parse(reply, self._config.max_score), {}, None)
        except JudgeError as error:
            return Score(None, {}, f"JudgeError: {error}")


def start_judge(config: ServeRewardConfig, workers: WorkerGroup, watchdog: Watchdog) -> EngineJudge:
    """Start the judge's engine on ``workers``. Raises ValueError, one line, if model or tokenizer is missing."""
    engine, judge = config.judge_engine, config.reward.judge
    tokenizer = load_tokenizer(engine.model)
    spec = RolloutSpec(
        model=engine.model,
        rollout=engine.rollout,
        max_model_len=engine.rollout.max_model_len or engine.max_prompt_length + judge.max_tokens,
        device=config.trainer.device,
    )
    sampling = Sampling(
        temperature=judge.temperature,
        top_k=engine.rollout.top_k,
        top_p=engine.rollout.top_p,
        max_tokens=judge.max_tokens,
        stop_token_ids=stop_token_ids(tokenizer, engine.model),
    )
    return EngineJudge(
        start_engine(workers, spec, watchdog, seed=config.trainer.seed),
        tokenizer,
        judge,
        sampling,
        template_kwargs=engine.apply_chat_template_kwargs,
        longest=engine.max_prompt_length,
        seed=config.trainer.seed,
    )
