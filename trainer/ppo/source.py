"""Where a step's answers come from: generate, score, and keep what can be learned from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from trainer.metrics import Phases
from trainer.remote import RemoteRollout
from trainer.rewards.runner import Answer, RewardRunner, Score
from workers.batch import Batch
from workers.rollout.base import Sampling
from workers.seeding import seed_of


class Source:
    """Answers of the present policy, made when they are asked for."""

    def __init__(
        self,
        rollout: RemoteRollout,
        rewards: RewardRunner,
        tokenizer: PreTrainedTokenizerBase,
        *,
        n: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """n: answers a prompt; sampling: how they are drawn, from ``seed``."""
        self.rollout = rollout
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.n = n
        self.sampling = sampling
        self.seed = seed

    def collect(self, step: int, prompts: Sequence[Prompt], phases: Phases) -> Batch:
        """The step's training batch: scored answers, ``n`` a prompt, in prompt order. Rows whose reward failed are
        left out and counted in meta["reward/failed"]. Raises RuntimeError if every reward failed.
        """
        return drop_failed(self.answer(prompts, self.n, self.sampling, phases, purpose="train", step=step))

    def answer(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, phases: Phases, *, purpose: str, step: int) -> Batch:
        """``n`` answers to each prompt, scored. B = n * len(prompts) rows, a prompt's answers side by side.

        tokens: input_ids, response_mask, rollout_log_probs, token_level_scores (the score, at the last token).
        rows: uid, sample, prompt_length, score, finished, weight_version, reward_failed.
        objects: prompt, response, ground_truth, data_source, reward_extra, reward_error.
        """
        asked = [prompt for prompt in prompts for _ in range(n)]
        samples = list(range(n)) * len(prompts)
        seeds = [seed_of(self.seed, purpose, step, prompt.uid, sample) for prompt, sample in zip(asked, samples, strict=True)]
        with phases("gen"):
            questions = Batch(
                lengths=torch.tensor([len(prompt.prompt_ids) for prompt in asked], dtype=torch.int64),
                tokens={"input_ids": torch.tensor([token for prompt in asked for token in prompt.prompt_ids])},
                rows={"seed": torch.tensor(seeds)},
            )
            answers = self.rollout.generate(questions, sampling, n)
        with phases("reward"):
            finished = answers.rows["finished"].bool().tolist()
            # What ends an answer is no part of its text; any other special token is, or "4<pad>2" would count as 42.
            written = [
                ids[: len(ids) - done].tolist() for ids, done in zip(answers.split_rows("input_ids"), finished, strict=True)
            ]
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=False)
            scores = self.rewards.score(
                [
                    Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, finished=done)
                    for prompt, text, done in zip(asked, texts, finished, strict=True)
                ]
            )
        batch = join(questions, answers)
        score = torch.tensor([0.0 if item.value is None else item.value for item in scores])
        token_level_scores = torch.zeros(batch.total_tokens)
        token_level_scores[batch.offsets[1:] - 1] = score
        batch.tokens["token_level_scores"] = token_level_scores
        batch.rows |= {
            "uid": torch.tensor([prompt.uid for prompt in asked]),
            "sample": torch.tensor(samples),
            "score": score,
            "reward_failed": torch.tensor([item.value is None for item in scores]),
        }
        batch.objects = describe(asked, texts, scores)
        batch.meta = {"temperature": sampling.temperature}
        return batch


def join(questions: Batch, answers: Batch) -> Batch:
    """Each prompt and its answer as one sequence, with the mask of what the policy wrote."""
    pairs = list(zip(questions.split_rows("input_ids"), answers.split_rows("input_ids"), strict=True))
    log_probs = answers.split_rows("rollout_log_probs")
    return Batch(
        lengths=questions.lengths + answers.lengths,
        tokens={
            "input_ids": torch.cat([ids for pair in pairs for ids in pair]),
            "response_mask": torch.cat([part for q, a in pairs for part in (torch.zeros(len(q)), torch.ones(len(a)))]),
            "rollout_log_probs": torch.cat(
                [part for (q, _), answer in zip(pairs, log_probs, strict=True) for part in (torch.zeros(len(q)), answer)]
            ),
        },
        rows={"prompt_length": questions.lengths} | answers.rows,
    )


def describe(asked: Sequence[Prompt], texts: Sequence[str], scores: Sequence[Score]) -> dict[str, list]:
    """What people and loggers read of each row."""
    return {
        "prompt": [prompt.text for prompt in asked],
        "response": list(texts),
        "ground_truth": [prompt.ground_truth for prompt in asked],
        "data_source": [prompt.data_source for prompt in asked],
        "reward_extra": [score.extra for score in scores],
        "reward_error": [score.error for score in scores],
    }


def drop_failed(batch: Batch) -> Batch:
    failed = batch.rows["reward_failed"].bool()
    if failed.all():
        first = next(error for error in batch.objects["reward_error"] if error is not None)
        raise RuntimeError(f"all {len(batch)} rewards of the step failed; the first: {first}")
    kept = batch.select((~failed).nonzero().flatten()) if failed.any() else batch
    return kept.with_meta({"reward/failed": int(failed.sum())})
