"""Scoring of requests with a reward model on workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.reward_models import served_model
from configs.schema.serve_reward import ServeRewardConfig
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.data.encoding import token_ids
from trainer.rewards.conversations import Conversations, tokenizer_fingerprint, with_template
from trainer.rewards.models.reward_builder import check_one, engine_model, start_one
from trainer.rewards.models.reward_models import RewardModel
from trainer.rewards.scoring import Response, Score
from workers.batch import Batch
from workers.controller.group import WorkerGroup

NAME = "model"


class ServedScorer:
    """Scores responses with ``model``, which encodes conversations with its own tokenizer and template."""

    def __init__(self, model: RewardModel, conversations: Conversations, tokenizer_id: str) -> None:
        """words: hash of the tokenizer and template whose token ids are used unchanged; "": always encode the text."""
        self._model = model
        self._conversations = conversations
        self._tokenizer_id = tokenizer_id

    def score(self, answers: Sequence[Response]) -> list[Score]:
        """One normalised score per response, in order; the score of a conversation that the template rejects has an error."""
        read = [self._read(answer) for answer in answers]
        rows = [ids for ids in read if isinstance(ids, Tensor)]
        raw = iter(self._of_rows(rows) if rows else ())
        return [next(raw) if isinstance(ids, Tensor) else Score(None, {}, ids) for ids in read]

    def _read(self, answer: Response) -> Tensor | str:
        """Token ids of a conversation, int64 (n,), or the reason why there are none.

        Token ids of the same tokenizer are used unchanged, since encoding their text may give different ones. Messages are
        rendered with the template. A text without messages, as OpenRLHF sends it, is already rendered: its special tokens are
        written out, and none is added.
        """
        conversations = self._conversations
        try:
            if answer.ids and answer.tokenizer_id == self._tokenizer_id != "":
                return checked(torch.tensor(answer.ids, dtype=torch.int64))
            if answer.whole:
                return torch.from_numpy(conversations.ids_of_session(answer.messages, finished=answer.finished))
            if answer.messages is not None:
                return torch.from_numpy(conversations.ids(answer.messages, answer.solution_str, finished=answer.finished))
            (ids,) = token_ids(conversations.tokenizer, [answer.query], special=False)
        # One unreadable conversation must not fail the others of its batch, nor end the server: whatever a client's messages
        # raise, in the template too, is the error of its score.
        except Exception as error:
            what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return what + " ".join(str(error).split())
        return torch.from_numpy(ids).long()

    def _of_rows(self, rows: Sequence[Tensor]) -> list[Score]:
        ids = torch.cat(list(rows))
        tokens = {"input_ids": ids, "response_mask": torch.ones(len(ids))}
        raw, _ = self._model.scorer.score(Batch(torch.tensor([len(row) for row in rows]), tokens=tokens), (), ())
        return [self._normalised(score) for score in raw]

    def _normalised(self, raw: Score) -> Score:
        if raw.value is None:
            return raw
        return Score(float(self._model.normalised(torch.tensor(raw.value, dtype=torch.float64))), raw.extra, None)


def checked(ids: Tensor) -> Tensor:
    """``ids``, if it is a row of non-negative token ids; raises ValueError otherwise."""
    if ids.dim() != 1 or int(ids.min()) < 0:
        raise ValueError("token_ids has something that is no list of numbers from 0")
    return ids


def check_model(config: ServeRewardConfig) -> None:
    """Check the model before any process starts. Raises ValueError, one line."""
    check_one(NAME, served_model(config.model), config.trainer)


def start_scorer(config: ServeRewardConfig, workers: WorkerGroup, watchdog: Watchdog) -> ServedScorer:
    """Start the reward model on ``workers``. Raises ValueError, one line, if tokenizer or template is missing."""
    model = served_model(config.model)
    try:
        tokenizer = with_template(load_tokenizer(engine_model(model)), model.chat_template)
        conversations = Conversations(tokenizer, model.apply_chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"{NAME}: {error}") from error
    # Template arguments change the rendering but are not part of the hash: with them, token ids of clients are not used.
    tokenizer_id = "" if model.apply_chat_template_kwargs else tokenizer_fingerprint(tokenizer)
    return ServedScorer(
        start_one(NAME, model, None, workers, config.trainer, config.trainer, watchdog), conversations, tokenizer_id
    )
