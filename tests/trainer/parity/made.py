"""Synthetic responses: the trainer's distributions, tokens and log-probs as a test defines them."""

from collections.abc import Sequence

import numpy as np

from trainer.parity.agreement import EngineResponses

EOS, BOS, VOCAB = 1, 2, 11


def made(
    rows: Sequence[Sequence[int]],
    *,
    finished: Sequence[bool] | None = None,
    limit: int = 8,
    offset: float = 0.0,
    gap: float = 0.0,
    margin: float = 1.0,
) -> EngineResponses:
    """Responses of these tokens to prompts 10, 11 ... Every token is ``gap`` nats below the trainer's best, the second best
    ``margin``; the engine's log-probs differ by ``offset``.
    """
    tokens = np.array([token for row in rows for token in row])
    best = np.full(len(tokens), -0.25)
    own = best - gap
    return EngineResponses(
        limit=limit,
        uids=np.arange(10, 10 + len(rows)),
        lengths=np.array([len(row) for row in rows]),
        finished=np.array([row[-1] == EOS for row in rows] if finished is None else finished),
        token_ids=tokens,
        log_probs=own + offset,
        trainer_log_probs=own,
        entropy=-own,
        top_log_probs=np.stack([best, best - margin], axis=1),
    )


def drawn(count: int, *, from_temperature: float, at_temperature: float, spread: float = 1.5, seed: int = 0) -> EngineResponses:
    """``count`` responses of 20 tokens, each sampled from its own distribution, which the trainer has at another temperature.

    spread: standard deviation of the logits.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (count * 20, VOCAB))
    tokens = np.argmax(logits / from_temperature + rng.gumbel(size=logits.shape), axis=1)
    scaled = logits / at_temperature
    log_p = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    own = np.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
    return EngineResponses(
        limit=20,
        uids=np.arange(count),
        lengths=np.full(count, 20),
        finished=np.zeros(count, dtype=bool),
        token_ids=tokens,
        log_probs=own,
        trainer_log_probs=own,
        entropy=-(np.exp(log_p) * log_p).sum(1),
        top_log_probs=np.sort(log_p, axis=1)[:, :-3:-1],
    )
