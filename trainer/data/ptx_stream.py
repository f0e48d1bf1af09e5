"""Auxiliary pretraining texts (PPO-ptx) that are appended to the actor's mini-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import DataConfig
from trainer.algorithms.weights import token_weights
from trainer.data.order import DataOrder
from trainer.data.sft_dataset import SFTDataset
from workers.batch import Batch
from workers.seeding import seed_of


@dataclass(slots=True)
class PtxStream:
    """Endless stream of the rows of ``data``, in a new order each epoch. Its only state is ``drawn``, the rows used so far.

    coefficient: weight of the pretraining loss. ratio: text tokens per token of a mini-batch.
    """

    data: SFTDataset
    order: DataOrder
    coefficient: float
    ratio: float
    drawn: int = 0

    def extend(self, mini_batch: Batch) -> Batch:
        """Append the stream's next rows to the mini-batch: as many as fit in ratio * its tokens, at least one.

        mini_batch must have loss_weight. Appended rows have tokens["ptx"] 1, loss_weight coefficient / (their trained tokens),
        so that their loss is coefficient * mean, and 0 in every other column. Objects are dropped.
        """
        texts = self._next_rows(int(self.ratio * mini_batch.total_tokens))
        weights = self.coefficient * token_weights("token-mean", texts.tokens["response_mask"], texts.lengths, norm_length=1)
        columns = {name: column.new_zeros(texts.total_tokens, *column.shape[1:]) for name, column in mini_batch.tokens.items()}
        columns |= texts.tokens | {"loss_weight": weights, "ptx": torch.ones(texts.total_tokens)}
        rows = {name: column.new_zeros(len(texts), *column.shape[1:]) for name, column in mini_batch.rows.items()}
        # Unique negative groups: rows of a group count as responses to one prompt, whose shared prefix is computed once.
        rows |= {name: -1 - torch.arange(len(texts)) for name in ("uid", "group", "trajectory") if name in rows}
        policy = mini_batch.only(tokens=list(mini_batch.tokens), rows=list(mini_batch.rows))
        return Batch.concat([policy.with_tokens(ptx=torch.zeros(policy.total_tokens)), Batch(texts.lengths, columns, rows)])

    def _next_rows(self, max_tokens: int) -> Batch:
        """The next rows, at most ``max_tokens`` tokens in total unless the first one alone has more."""
        parts = [self._next()]
        left = max_tokens - parts[0].total_tokens
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
    """Stream configured by data.ptx_*; None without data.ptx_files. seed: seed of the data order."""
    if data.ptx_files is None:
        return None
    texts = SFTDataset(
        data.ptx_files,
        tokenizer,
        messages_key=None,
        tools_key=None,
        prompt_key=data.ptx_prompt_key,
        response_key=data.ptx_response_key,
        max_length=data.ptx_max_length,
        truncation=data.ptx_truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        keys="data.ptx_",
    )
    # Batches of one row: the number of rows per mini-batch varies with their lengths, and none is dropped at an epoch's end.
    order = DataOrder(len(texts), 1, seed_of(seed, "ptx"), data.shuffle)
    return PtxStream(texts, order, coefficient, ratio)
