"""Texts that go along with the actor's mini-batches, row after row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import DataConfig
from trainer.algorithms.weights import token_weights
from trainer.data.order import DataOrder
from trainer.data.sft import SFTDataset
from workers.batch import Batch
from workers.seeding import seed_of


@dataclass(slots=True)
class PtxStream:
    """The rows of ``data`` in an order of their own, a new one each epoch. ``drawn``, the rows so far, is all its state.

    coefficient: of their loss. ratio: their tokens for each token of a mini-batch.
    """

    data: SFTDataset
    order: DataOrder
    coefficient: float
    ratio: float
    drawn: int = 0

    def beside(self, mini_batch: Batch) -> Batch:
        """The mini-batch, which carries its loss_weight, and behind it the stream's next rows: as many as stay within
        ratio * its tokens, one at least.

        Added rows have tokens["ptx"] 1, loss_weight coefficient / (trained tokens of all that are added), which makes the loss
        coefficient * their mean, a uid below 0, each its own (they share no prompt), and 0 in every other column. Objects are
        left out.
        """
        texts = self._draw(int(self.ratio * mini_batch.total_tokens))
        weights = self.coefficient * token_weights("token-mean", texts.tokens["response_mask"], texts.lengths, norm_length=1)
        columns = {name: column.new_zeros(texts.total_tokens, *column.shape[1:]) for name, column in mini_batch.tokens.items()}
        columns |= texts.tokens | {"loss_weight": weights, "ptx": torch.ones(texts.total_tokens)}
        rows = {name: column.new_zeros(len(texts), *column.shape[1:]) for name, column in mini_batch.rows.items()}
        rows |= {"uid": -1 - torch.arange(len(texts))} if "uid" in rows else {}
        ours = mini_batch.only(tokens=list(mini_batch.tokens), rows=list(mini_batch.rows))
        return Batch.concat([ours.with_tokens(ptx=torch.zeros(ours.total_tokens)), Batch(texts.lengths, columns, rows)])

    def _draw(self, most: int) -> Batch:
        """The next rows, ``most`` tokens together unless the first one alone has more."""
        parts = [self._next()]
        left = most - parts[0].total_tokens
        while (row := self._peek()).total_tokens <= left:
            parts.append(self._next())
            left -= row.total_tokens
        return Batch.concat(parts)

    def _peek(self) -> Batch:
        return self.data.batch(self.order.batch(self.drawn))

    def _next(self) -> Batch:
        row = self._peek()
        self.drawn += 1
        return row

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def ptx_stream(
    data: DataConfig, coefficient: float, ratio: float, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PtxStream | None:
    """What data.ptx_files and the keys beside it say; None without them. seed: of the data's order."""
    if data.ptx_files is None:
        return None
    texts = SFTDataset(
        data.ptx_files,
        tokenizer,
        messages_key=None,
        prompt_key=data.ptx_prompt_key,
        response_key=data.ptx_response_key,
        max_length=data.ptx_max_length,
        truncation=data.ptx_truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        keys="data.ptx_",
    )
    order = DataOrder(len(texts), 1, seed_of(seed, "ptx"), data.shuffle)
    return PtxStream(texts, order, coefficient, ratio)
