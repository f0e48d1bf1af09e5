"""Generative judge on a colocated rollout engine: reward.judge without an external server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import JudgeRewardConfig
from configs.schema.serve_reward import ServeRewardConfig
from trainer.cluster.launch import opened_workers
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer, stop_token_ids
from trainer.data.encoding import encode
from trainer.rewards.rules.judge import JudgeError, parse, prompt
from trainer.rewards.scoring import Response, Score
from trainer.rollout.rollout_builder import start_engine
from trainer.serving.model_engine import Generation, ModelEngine
from trainer.serving.request_queue import ServerStopping
from workers.roles.rollout_engines import check_installed
from workers.rollout.base import RolloutSpec, Sampling
from workers.seeding import seed_of


class EngineJudge:
    """Scores responses by prompting a language model and parsing its reply."""

    def __init__(
        self,
        engine: ModelEngine,
        tokenizer: PreTrainedTokenizerBase,
        config: JudgeRewardConfig,
        *,
        template_kwargs: dict[str, Any],
        longest: int,
        seed: int,
    ) -> None:
        """longest: maximum tokens of a judge prompt. seed: of the judge's replies; equal prompts get equal replies."""
        self.engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._template_kwargs = template_kwargs
        self._longest = longest
        self._seed = seed

    async def scores(self, answers: Sequence[Response]) -> list[Score]:
        """One score per response, parsed from the judge's reply (see trainer.rewards.rules.judge.parse), or an error.

        Called in the event loop. Raises ServerStopping.
        """
        return await asyncio.gather(*map(self._score, answers))

    async def _score(self, answer: Response) -> Score:
        # A response that cannot be put into a prompt fails alone: without a question, or with half of a surrogate pair.
        try:
            ids = self._question(answer)
        except (ValueError, TypeError) as error:
            return Score(None, {}, str(error))
        if isinstance(ids, str):
            return Score(None, {}, ids)
        try:
            return Score(parse(await self._reply(ids), self._config.max_score), {}, None)
        except JudgeError as error:
            return Score(None, {}, f"JudgeError: {error}")

    def _question(self, answer: Response) -> list[int] | str:
        """Token ids of reward.judge.prompt, filled in, as a user message; or the reason why there are none."""
        # In a parquet file all rows have the fields that one of them has, as nulls.
        fields = {"question": answer.prompt} | {name: value for name, value in answer.extra_info.items() if value is not None}
        text = prompt(self._config.prompt, answer.solution_str, answer.ground_truth, fields)
        ((_, ids),) = encode(self._tokenizer, [[{"role": "user", "content": text}]], self._template_kwargs)
        if len(ids) > self._longest:
            return f"the judge's prompt has {len(ids)} tokens, judge_engine.max_prompt_length is {self._longest}"
        return ids.tolist()

    async def _reply(self, ids: list[int]) -> str:
        """The judge's reply, without stop token and special tokens."""
        reply = asyncio.get_running_loop().create_future()
        # A function of the prompt alone: a reply does not depend on the requests that the engine has at the same time.
        seed = seed_of(self._seed, "judge", str(ids))
        generation = Generation(ids, self.engine.sampling, seed, reply.set_result, reads_along=False)
        self.engine.submit([[generation]])
        try:
            update = await reply
        finally:
            self.engine.cancel([generation.id])  # if the client has gone; a reply that has ended is ignored
        if update is None:
            raise ServerStopping
        end = len(update.token_ids) - (update.finish_reason == "stop")
        return str(self._tokenizer.decode(update.token_ids[:end], skip_special_tokens=True))


def start_judge(config: ServeRewardConfig, watchdog: Watchdog, stack: ExitStack) -> EngineJudge:
    """Start a judge on workers, which end with ``stack``. Raises ValueError, one line, if model or tokenizer is missing."""
    engine, judge = config.judge_engine, config.reward.judge
    check_installed(engine.rollout.name)
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
    engines = start_engine(stack.enter_context(opened_workers(config)), spec, watchdog, seed=config.trainer.seed)
    return EngineJudge(
        ModelEngine(engines, sampling, most=sys.maxsize),  # as many wait as with other scorers
        tokenizer,
        judge,
        template_kwargs=engine.apply_chat_template_kwargs,
        longest=engine.max_prompt_length,
        seed=config.trainer.seed,
    )
