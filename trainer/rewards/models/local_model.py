"""Reward model on the run's own workers: encode conversations for it, run its forward pass, read the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.scoring_model import ScoringModelConfig
from trainer.cluster.remote import RemoteModel
from trainer.data.dataset import Prompt
from trainer.data.encoding import truncate
from trainer.rewards.conversations import Conversations
from trainer.rewards.scoring import Score
from workers.batch import Batch


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Input of the model: ids, int64 (n,), with ``cut`` if truncated; or ids None and the reason."""

    ids: Tensor | None
    cut: bool = False
    error: str | None = None


class LocalModel:
    """Scorer (see trainer.rewards.models.reward_models.Scorer) that runs a reward model on the run's workers."""

    def __init__(
        self,
        name: str,
        config: ScoringModelConfig,
        model: RemoteModel,
        conversations: Conversations | None,
        *,
        longest: int | None,
        vocabulary: int,
    ) -> None:
        """conversations: encoder for the model's tokenizer; None: the model reads the policy's tokens.

        longest: maximum number of input tokens; None: no limit. vocabulary: size of the model's vocabulary.
        """
        self.name = name
        self.config = config
        self.model = model
        self.conversations = conversations
        self.longest = longest
        self.vocabulary = vocabulary

    def score(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Score], Tensor | None]:
        inputs = [self._fit(ids) for ids in self._encode(answers, prompts, texts)]
        # Failed rows are left out of the forward pass, so its outputs are consumed by the others in order.
        outputs = iter(self._forward([one.ids for one in inputs if one.ids is not None]))
        scores, columns = [], []
        for one, mask in zip(inputs, answers.split_rows("response_mask"), strict=True):
            value = next(outputs) if one.ids is not None else torch.zeros(())
            if self.config.kind == "token":
                columns.append(torch.where(mask.bool(), value, 0.0))
                value = columns[-1].double().sum()
            scores.append(self._to_score(one, float(value)))
        return scores, torch.cat(columns) if self.config.kind == "token" else None

    def _encode(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Tensor | str]:
        """Token ids of each conversation, int64 (n,), or the reason why there are none."""
        if self.conversations is None:
            return list(answers.split_rows("input_ids"))
        found: list[Tensor | str] = []
        finished = answers.rows["finished"].bool().tolist()
        sessions = answers.objects.get("session", [None] * len(answers))
        for prompt, text, done, session in zip(prompts, texts, finished, sessions, strict=True):
            try:
                if session is not None:
                    ids = self.conversations.ids_of_session(session["messages"], finished=done)
                else:
                    ids = self.conversations.ids(prompt.messages, text, finished=done)
                found.append(torch.from_numpy(ids))
            except ValueError as error:
                found.append(str(error))
        return found

    def _fit(self, ids: Tensor | str) -> ModelInput:
        """Check and truncate the ids of a conversation."""
        if isinstance(ids, str):
            return ModelInput(None, error=ids)
        if not len(ids):
            return ModelInput(None, error="there is no token to score")
        # An index beyond the embedding is a device-side assertion on CUDA, which ends the process.
        if int(ids.max()) >= self.vocabulary:
            reason = f"the conversation has token {int(ids.max())}, the model's vocabulary {self.vocabulary}"
            return ModelInput(None, error=reason)
        if self.longest is None or len(ids) <= self.longest:
            return ModelInput(ids)
        if self.config.truncation == "fail":
            return ModelInput(None, error=f"the conversation has {len(ids)} tokens, and the model reads {self.longest} at most")
        return ModelInput(torch.from_numpy(truncate(ids.numpy(), self.longest, self.config.truncation)), cut=True)

    def _forward(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Score () of each row, int64 (n,), or with kind=token the scores of its tokens (n,)."""
        if not rows:
            return []
        ids = torch.cat(list(rows))
        batch = Batch(
            lengths=torch.tensor([len(row) for row in rows]),
            tokens={"input_ids": ids, "response_mask": torch.ones(len(ids))},
        )
        if self.config.kind == "sequence":
            return list(self.model.forward(batch, ["scores"]).rows["scores"])
        # values[t] belongs to the state before token t; the score of token t is that of the state after it: shift by one.
        found = self.model.forward(batch, ["values"])
        after = zip(found.split_rows("values"), found.rows["last_value"], strict=True)
        return [torch.cat([before[1:], last[None]]) for before, last in after]

    def _to_score(self, model_input: ModelInput, value: float) -> Score:
        extra = {} if self.config.truncation == "fail" else {f"{self.name}_cut": float(model_input.cut)}
        if model_input.ids is None:
            return Score(None, extra, model_input.error)
        return Score(value, extra, None) if math.isfinite(value) else Score(None, extra, f"the model's score is {value}")
