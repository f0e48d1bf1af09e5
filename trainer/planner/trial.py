"""Trial of a dry run: a prompt as the model reads it, responses of a model that is small, and their scores."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.common import ModelConfig
from configs.schema.ppo import PPOConfig, asks_rules
from trainer.data.dataset import Prompt, PromptDataset
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.rules.reward_registry import may_ask_judge
from trainer.rewards.scoring import Response, Score
from trainer.rollout.rollout_builder import rollout_spec
from workers.engine.hf.hf_model import DTYPES, auto_class, model_config
from workers.model_path import model_path
from workers.rollout.base import Request, Sampling
from workers.rollout.embedded.embedded_engine import EmbeddedRollout

PROMPTS, RESPONSES, TOKENS = 4, 4, 256
"""Sizes of the trial, at most: prompts, responses per prompt, tokens of a response."""
LARGEST = 100_000_000
"""Parameters of a model that generates within seconds on a CPU."""
SHOWN = 240
"""Characters of a text, at most."""


@dataclass
class Trial:
    """Results of a trial. lines: for the plan. wrong: problems that would harm the run, one line each."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def trial(config: PPOConfig, data: PromptDataset, tokenizer: PreTrainedTokenizerBase, asked: Sampling, parameters: int) -> Trial:
    """Render, generate and score a few prompts. parameters: of the actor. Its scoring processes have ended when it returns."""
    found = Trial()
    prompts = [data[i] for i in range(min(PROMPTS, len(data)))]
    found.lines.append(f"  a prompt, {len(prompts[0].prompt_ids)} tokens: {shown(prompts[0].text)}")
    responses: list[Response] = []
    if (why := no_responses(config, parameters)) is not None:
        found.lines.append(f"  no responses: {why}")
    else:
        responses = generated(config, prompts, tokenizer, asked)
        ended = sum(response.finished for response in responses)
        most = min(asked.max_tokens, TOKENS)
        found.lines.append(f"  {len(responses)} responses of at most {most} tokens, {ended} ended by themselves")
        found.lines.append(f"  the first: {shown(responses[0].solution_str)}")
        if not ended and most == asked.max_tokens and not asked.ignore_eos:
            found.wrong.append(
                f"no response of the trial ended within data.max_response_length={most} tokens: raise it, or use a model that "
                "has learnt to end"
            )
    if may_ask_judge(config.reward):
        found.lines.append("  no scores: a judge would be asked")
    elif asks_rules(config.reward) and not config.reward.remote_urls:
        truths = [truth_as_response(prompt) for prompt in prompts if isinstance(prompt.ground_truth, str | int | float)]
        other = next((prompt for prompt in prompts if not isinstance(prompt.ground_truth, str | int | float)), None)
        if other is not None:
            kind = "null" if other.ground_truth is None else f"a {type(other.ground_truth).__name__}"
            found.lines.append(f"  the ground truth of row {other.uid} is {kind}, which is not tried as a response")
        report(found, config, responses, truths, tokenizer)
    return found


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)")


def no_responses(config: PPOConfig, parameters: int) -> str | None:
    """Reason for which no responses are generated, None if there is none."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.enable or rollout.agent.program is not None:
        return "conversations need the run's agent processes"
    if parameters > LARGEST:
        return f"a dry run generates with models of {LARGEST / 1e6:g} million parameters at most"
    return None


def generated(
    config: PPOConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, asked: Sampling
) -> list[Response]:
    """Responses of the model to ``prompts``, several to each in turn, by the embedded engine on the CPU in float32."""
    model, n = config.actor_rollout_ref.model, min(RESPONSES, config.actor_rollout_ref.rollout.n)
    limited = replace(asked, max_tokens=min(asked.max_tokens, TOKENS))
    pairs = [prompt for prompt in prompts for _ in range(n)]
    # The engine reserves its cache at once: for these rows, not for the longest of the run.
    longest = max(len(prompt.prompt_ids) for prompt in prompts) + limited.max_tokens
    rollout = replace(
        config.actor_rollout_ref.rollout, name="embedded", dtype="float32", max_num_seqs=len(pairs), max_model_len=longest
    )
    with closing(EmbeddedRollout(rollout_spec(model, rollout, config.data, "cpu"))) as engine:
        engine.load_weights(iter(engine.to_engine_names(stored(model))), version=0)
        done = engine.generate([Request(i, prompt.prompt_ids, limited, seed=i) for i, prompt in enumerate(pairs)])
    ends = [completion.finish_reason == "stop" for completion in done]
    written = [list(completion.token_ids[: len(completion.token_ids) - end]) for completion, end in zip(done, ends, strict=True)]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    return [
        Response(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, end)
        for prompt, text, end in zip(pairs, texts, ends, strict=True)
    ]


def stored(model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the model's files, in float32."""
    about = model_config(model, "lm")
    loaded = auto_class(about, "lm").from_pretrained(
        model_path(model), config=about, dtype=DTYPES["float32"], trust_remote_code=model.trust_remote_code
    )
    return ((name, weight.detach()) for name, weight in loaded.named_parameters())


def truth_as_response(prompt: Prompt) -> Response:
    return Response(prompt.data_source, str(prompt.ground_truth), prompt.ground_truth, prompt.extra_info, True)


def report(
    found: Trial, config: PPOConfig, responses: Sequence[Response], truths: Sequence[Response], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Score responses and ground truths, and add what that shows."""
    # One process, also where a run scores in its own: code of the user that hangs has a time limit.
    with RewardRunner(replace(config.reward, num_workers=1)) as rewards:
        rewards.wait_ready()
        scores = rewards.score([*responses, *truths])
    of_responses, of_truths = scores[: len(responses)], scores[len(responses) :]
    if values := values_of(of_responses):
        found.lines.append(f"  scores of the responses: mean {statistics.mean(values):.3g}, {min(values):g} to {max(values):g}")
        if len(values) > 1 and min(values) == max(values):
            found.lines.append("  all are equal: a group in which they are has no gradient")
    if values := values_of(of_truths):
        found.lines.append(f"  score of the ground truth as response: mean {statistics.mean(values):.3g}, first {values[0]:g}")
        limit = config.data.max_response_length
        lengths = [len(tokenizer.encode(truth.solution_str, add_special_tokens=False)) for truth in truths]
        # Where it scores, the ground truth is a response, and not for example the tests of a program.
        if min(values) > 0 and max(lengths) > limit:
            found.wrong.append(
                f"data.max_response_length={limit}: the ground truth of {sum(length > limit for length in lengths)} of "
                f"{len(lengths)} prompts has more tokens, up to {max(lengths)}; raise it"
            )
    if errors := [score.error for score in scores if score.error is not None]:
        found.wrong.append(f"{len(errors)} of {len(scores)} rewards of the trial failed: {' '.join(errors[0].split())}")


def values_of(scores: Sequence[Score]) -> list[float]:
    return [score.value for score in scores if score.value is not None and score.error is None]
