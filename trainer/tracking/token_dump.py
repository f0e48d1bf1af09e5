"""A few of a step's answers token by token: what the rollout engine and the trainer made of each, and what it was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.cluster.remote import RemoteModel
from trainer.run.run_dir import ANSWERS, GLOBAL_STEP, LineWriter, json_line
from trainer.tracking.sample_dump import text_of
from workers.batch import Batch

KEPT_STEPS = 50
"""Of a run, evenly spread: what is kept does not grow with its length."""
FORWARD_EVERY = 10
"""Steps, where the trainer's log-probs take a forward of their own: in a small run a tenth of a step."""
KEPT_ROWS = 8  # of such a step, from the worst to the best
KEPT_TOKENS = 512  # of an answer
SHOWN_STEPS = 3  # in the report: so many of the last, and of each tenth of the run
BROKEN = "\ufffd"  # a part of a character
SHOWN_ROWS = 2  # of the tenths' steps


class AnswerLog:
    """answers.jsonl of a run directory."""

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerBase, total_steps: int, *, forwards: bool) -> None:
        """forwards: the batch's old_log_probs are not the trainer's, or are not there: it is asked for those of the rows."""
        self._path = run_dir / ANSWERS
        self._tokenizer = tokenizer
        self._total_steps = total_steps
        self._every = max(-(-total_steps // KEPT_STEPS), FORWARD_EVERY if forwards else 1)
        self._forwards = forwards

    def keep(self, step: int, batch: Batch, actor: RemoteModel) -> None:
        """Before the update. tokens: input_ids, response_mask, rollout_log_probs, advantages, old_log_probs unless ``forwards``.
        rows: uid, score, prompt_length. objects: prompt, ground_truth."""
        if step % self._every and step != self._total_steps:
            return
        few = batch.select(spread(batch.rows["score"], max(KEPT_ROWS, len(actor.mesh.answers))))
        if self._forwards:
            written = few.positions() >= torch.repeat_interleave(few.rows["prompt_length"], few.lengths)
            trainers = actor.forward(few.with_tokens(response_mask=written.float()), ["log_probs"]).tokens["log_probs"]
        else:
            trainers = few.tokens["old_log_probs"]
        lines = [
            json_line({GLOBAL_STEP: step, **self._told(few, row, trainers)})
            for row in spread(few.rows["score"], KEPT_ROWS).tolist()
        ]
        file = LineWriter(self._path)
        file.write("".join(lines))
        file.close()

    def _told(self, batch: Batch, row: int, trainers: Tensor) -> dict[str, Any]:
        start, end = batch.offsets[row : row + 2].tolist()
        start += int(batch.rows["prompt_length"][row])
        cut = slice(start, min(end, start + KEPT_TOKENS))
        return {
            "uid": int(batch.rows["uid"][row]),
            "prompt": batch.objects["prompt"][row],
            "ground_truth": text_of(batch.objects["ground_truth"][row]),
            "score": float(batch.rows["score"][row]),
            "length": end - start,
            "tokens": pieces(self._tokenizer, batch.tokens["input_ids"][cut].tolist()),
            "rollout": rounded(batch.tokens["rollout_log_probs"][cut]),
            "trainer": rounded(trainers[cut]),
            "advantages": rounded(batch.tokens["advantages"][cut]),
        }


def spread(scores: Tensor, n: int) -> Tensor:
    """Rows (at most ``n``) from the lowest score to the highest, evenly, in the order of the batch."""
    if n >= len(scores):
        return torch.arange(len(scores))
    order = torch.argsort(scores, stable=True)
    return order[torch.linspace(0, len(scores) - 1, n).round().long()].sort().values


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token where it stands; one that is in several tokens is the first's, and the others have none."""
    if not ids:
        return []
    plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    alone = tokenizer.batch_decode([[token] for token in ids], **plain)
    pairs = tokenizer.batch_decode([list(pair) for pair in pairwise(ids)], **plain) if len(ids) > 1 else []
    texts = alone[:1] + [
        pair[len(before) :] if pair.startswith(before) and BROKEN not in pair else own
        for pair, (before, own) in zip(pairs, pairwise(alone), strict=True)
    ]
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
    """For people, and short. None: not finite."""
    return [float(f"{value:.4g}") if isfinite(value) else None for value in values.tolist()]


def shown(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All rows of the last SHOWN_STEPS steps of answers.jsonl, and SHOWN_ROWS of the first step in each tenth of it."""
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
