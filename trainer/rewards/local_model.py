"""A reward model on the run's own workers: which tokens it reads, and what it makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.scoring_model import ScoringModelConfig
from trainer.data.conversations import Conversations
from trainer.data.dataset import Prompt
from trainer.data.encoding import truncate
from trainer.remote import RemoteModel
from trainer.rewards.scoring import Score
from workers.batch import Batch


@dataclass(frozen=True, slots=True)
class Read:
    """What the model reads of a conversation: ids, int64 (n,), cut if there was more; or why it reads nothing."""

    ids: Tensor | None
    cut: bool = False
    error: str | None = None


class LocalModel:
    """See trainer.rewards.models.Scorer."""

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
        """conversations: makes the tokens that the model reads; None: they are the policy's. longest: that it reads."""
        self.name = name
        self.config = config
        self.model = model
        self.conversations = conversations
        self.longest = longest
        self.vocabulary = vocabulary

    def score(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Score], Tensor | None]:
        read = [self._fit(ids) for ids in self._read(answers, prompts, texts)]
        found = iter(self._forward([one.ids for one in read if one.ids is not None]))
        scores, columns = [], []
        for one, mask in zip(read, answers.split_rows("response_mask"), strict=True):
            given = next(found) if one.ids is not None else torch.zeros(())
            if self.config.kind == "token":
                columns.append(torch.where(mask.bool(), given, 0.0))
                given = columns[-1].double().sum()
            scores.append(self._told(one, float(given)))
        return scores, torch.cat(columns) if self.config.kind == "token" else None

    def _read(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Tensor | str]:
        """int64 (n,) for each answer, or why there are none."""
        if self.conversations is None:
            return list(answers.split_rows("input_ids"))
        found: list[Tensor | str] = []
        for prompt, text, finished in zip(prompts, texts, answers.rows["finished"].bool().tolist(), strict=True):
            try:
                found.append(torch.from_numpy(self.conversations.ids(prompt.messages, text, finished=finished)))
            except ValueError as error:
                found.append(str(error))
        return found

    def _fit(self, ids: Tensor | str) -> Read:
        if isinstance(ids, str):
            return Read(None, error=ids)
        if int(ids.max()) >= self.vocabulary:
            return Read(None, error=f"the conversation has token {int(ids.max())}, the model's vocabulary {self.vocabulary}")
        if self.longest is None or len(ids) <= self.longest:
            return Read(ids)
        if self.config.truncation == "fail":
            return Read(None, error=f"the conversation has {len(ids)} tokens, and the model reads {self.longest} at most")
        return Read(torch.from_numpy(truncate(ids.numpy(), self.longest, self.config.truncation)), cut=True)

    def _forward(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Of each row, int64 (n,), its score (), or with kind=token those of its tokens (n,)."""
        if not rows:
            return []
        ids = torch.cat(list(rows))
        batch = Batch(
            lengths=torch.tensor([len(row) for row in rows]),
            tokens={"input_ids": ids, "response_mask": torch.ones(len(ids))},
        )
        if self.config.kind == "sequence":
            return list(self.model.forward(batch, ["scores"]).rows["scores"])
        found = self.model.forward(batch, ["values"])  # of the state before each token, and after the last
        after = zip(found.split_rows("values"), found.rows["last_value"], strict=True)
        return [torch.cat([before[1:], last[None]]) for before, last in after]

    def _told(self, read: Read, value: float) -> Score:
        extra = {} if self.config.truncation == "fail" else {f"{self.name}_cut": float(read.cut)}
        if read.ids is None:
            return Score(None, extra, read.error)
        return Score(value, extra, None) if math.isfinite(value) else Score(None, extra, f"the model's score is {value}")
