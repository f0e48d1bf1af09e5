"""Dump of a few responses per step, token by token: text, advantage, and log-probs of rollout engine and trainer.

The report colours tokens by the difference of the two log-probs. Steps, rows and tokens are bounded, so that neither the file nor
the page grows with the length of a run. Usually the trainer's log-probs are in the batch; where they are not, they cost an
additional forward pass, which is made for these few rows only and in fewer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.algorithms.segments import first_in
from trainer.algorithms.trajectories import Trajectories
from trainer.cluster.remote import RemoteModel
from trainer.run.run_dir import ANSWERS, GLOBAL_STEP, LineWriter, json_line
from trainer.tracking.conversation import conversation_of
from trainer.tracking.sample_dump import text_of
from workers.batch import Batch

KEPT_STEPS = 50
"""Maximum number of dumped steps, evenly spaced over the run from the first to the last."""
FORWARD_EVERY = 10
"""Minimum interval in steps if the log-probs need a forward pass of their own, which takes a tenth of a step in a small run."""
KEPT_ROWS = 8  # trajectories of a dumped step, from the lowest to the highest score
KEPT_TOKENS = 512  # first tokens of a response
SHOWN_STEPS = 3  # last steps in the report, shown with all rows
BROKEN = "\ufffd"  # replacement character: the token ends or begins within a character
SHOWN_ROWS = 2  # rows in the report of one step in each tenth of the run


class ResponseLog:
    """Writer of answers.jsonl in a run directory."""

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerBase, total_steps: int, *, forwards: bool) -> None:
        """forwards: the batch has no old_log_probs, or not the trainer's; compute those of the dumped rows."""
        self._path = run_dir / ANSWERS
        self._tokenizer = tokenizer
        self._total_steps = total_steps
        self._every = max(-(-(total_steps - 1) // (KEPT_STEPS - 1)), FORWARD_EVERY if forwards else 1)
        self._forwards = forwards

    def record(self, step: int, batch: Batch, actor: RemoteModel) -> None:
        """Dump trajectories of a step that is kept. Called before the update, which changes the log-probs.

        batch: tokens input_ids, sampled_mask, rollout_log_probs, advantages, and old_log_probs unless ``forwards``; rows uid,
        trajectory, part, score; objects prompt, ground_truth, and session if the responses are sessions.
        """
        # From the first step on, which takes its time anyway: where layers are compiled, the first forward pass takes seconds.
        if (step - 1) % self._every and step != self._total_steps:
            return
        # At least one row per data-parallel rank for the forward pass; only KEPT_ROWS of them are written.
        trajectories = Trajectories.of(batch)
        chosen = spread(batch.rows["score"][trajectories.last], max(KEPT_ROWS, len(actor.mesh.output_ranks)))
        few = batch.select(torch.isin(trajectories.of_row, chosen).nonzero().flatten())
        if self._forwards:
            # All sampled tokens, also those that the loss excludes. Those observed between them have 0, as in rollout_log_probs.
            sampled = few.with_tokens(response_mask=few.tokens["sampled_mask"])
            trainers = actor.forward(sampled, ["log_probs"]).tokens["log_probs"]
        else:
            trainers = few.tokens["old_log_probs"]
        # Each row from its first sampled token on: what precedes it is the prompt or, in a later part, a repeated context.
        first = first_in(few.tokens["sampled_mask"], few.lengths)[few.segment_ids()]
        few = few.with_tokens(trainer=trainers, shown=few.positions() >= first)
        few = Trajectories.of(few).joined(few)
        lines = [json_line({GLOBAL_STEP: step, **self._entry(few, i)}) for i in spread(few.rows["score"], KEPT_ROWS).tolist()]
        file = LineWriter(self._path)
        file.write("".join(lines))
        file.close()

    def _entry(self, batch: Batch, row: int) -> dict[str, Any]:
        """One trajectory as JSON. batch: tokens trainer (the trainer's log-probs) and shown, besides those of ``record``."""
        start, end = batch.offsets[row : row + 2].tolist()
        shown = start + batch.tokens["shown"][start:end].nonzero().flatten()
        cut = shown[:KEPT_TOKENS]
        entry = {
            "uid": int(batch.rows["uid"][row]),
            # With these two the row of the last part is found in the step's parquet file.
            "trajectory": int(batch.rows["trajectory"][row]),
            "part": int(batch.rows["part"][row]),
            "prompt": batch.objects["prompt"][row],
            "ground_truth": text_of(batch.objects["ground_truth"][row]),
            "score": float(batch.rows["score"][row]),
            "length": len(shown),
            "tokens": pieces(self._tokenizer, batch.tokens["input_ids"][cut].tolist()),
            "rollout": rounded(batch.tokens["rollout_log_probs"][cut]),
            "trainer": rounded(batch.tokens["trainer"][cut]),
            "advantages": rounded(batch.tokens["advantages"][cut]),
        }
        if observed := spans(batch.tokens["sampled_mask"][cut] == 0):
            entry["observed"] = observed
        if "session" in batch.objects:
            entry["conversation"] = conversation_of(batch.objects["session"][row]["messages"])
        return entry


def spans(mask: Tensor) -> list[list[int]]:
    """[start, end) of each run of true values of a mask (n,)."""
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero().flatten()
    return edges.reshape(-1, 2).tolist()


def spread(scores: Tensor, n: int) -> Tensor:
    """Indices of at most ``n`` rows, evenly spaced by rank of their score (B,), in the order of the batch."""
    if n >= len(scores):
        return torch.arange(len(scores))
    order = torch.argsort(scores, stable=True)
    return order[torch.linspace(0, len(scores) - 1, n).round().long()].sort().values


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Text of each token in its context. A character made of several tokens belongs to the first; the others are empty.

    Decoding tokens one by one is not enough: a tokenizer may drop a space at the start of a text, and a byte-level token may hold
    only a part of a character. So each token is decoded together with its predecessor, whose own text is then removed.
    """
    if not ids:
        return []
    plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    alone = tokenizer.batch_decode([[token] for token in ids], **plain)
    pairs = tokenizer.batch_decode([list(pair) for pair in pairwise(ids)], **plain) if len(ids) > 1 else []
    texts = alone[:1] + [
        pair[len(before) :] if pair.startswith(before) and BROKEN not in pair else own
        for pair, (before, own) in zip(pairs, pairwise(alone), strict=True)
    ]
    # Join each run of tokens with partial characters and decode it as a whole.
    start = 0
    while start < len(ids):
        end = start + 1
        if BROKEN in texts[start]:
            while end < len(ids) and BROKEN in texts[end]:
                end += 1
            texts[start:end] = [str(tokenizer.decode(list(ids[start:end]), **plain)), *[""] * (end - start - 1)]
        start = end
    return texts


def rounded(values: Tensor) -> list[float | None]:
    """Values with four significant digits, to keep the file small. None for those that are not finite."""
    return [float(f"{value:.4g}") if isfinite(value) else None for value in values.tolist()]


def shown(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Select entries of answers.jsonl for the report.

    All rows of the last SHOWN_STEPS steps, and SHOWN_ROWS rows (first and last) of the first step in each tenth of all steps.
    """
    steps = list(dict.fromkeys(entry[GLOBAL_STEP] for entry in entries))
    last = steps[-SHOWN_STEPS:]
    early = {steps[len(steps) * tenth // 10] for tenth in range(10)} - set(last) if steps else set()
    found = []
    for step in steps:
        rows = [entry for entry in entries if entry[GLOBAL_STEP] == step]
        if step in last:
            found += rows
        elif step in early:
            found += [rows[0], rows[-1]][: min(SHOWN_ROWS, len(rows))]
    return found
