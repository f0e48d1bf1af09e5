"""Embedded engines and requests for tests, and what plain transformers makes of the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.schema.agents import AgentConfig, MultiTurnConfig
from configs.schema.common import Dtype
from configs.schema.ppo import EngineKwargsConfig, RolloutConfig, SamplingConfig
from tests.tiny import model_config, save_tiny_model
from workers.engine.base import Weights
from workers.rollout.base import Completion, Request, Rollout, RolloutSpec, Sampling
from workers.rollout.embedded.embedded_engine import EmbeddedRollout
from workers.rollout.sync.weight_sync import WeightSync

VOCAB = 61


SINGLE_TURN = MultiTurnConfig(
    enable=False, max_assistant_turns=None, max_user_turns=None, max_parallel_calls=1, max_tool_response_length=256,
    tool_response_truncate_side="middle", format="hermes", tool_config_path=None, function_tool_path=None,
    interaction_config_path=None, environment=None, tool_timeout=60.0, on_break="split",
)  # fmt: skip


def spec_of(
    path: str,
    *,
    slots: int = 64,
    max_model_len: int = 128,
    dtype: Dtype = "float32",
    override_config: dict[str, object] | None = None,
    name: Literal["embedded", "vllm", "sglang"] = "embedded",
    tensor_model_parallel_size: int = 1,
    update_weights_bucket_megabytes: int = 64,
    verify_weights: Literal["off", "sample", "full"] = "sample",
    balance: Literal["tokens", "static"] = "tokens",
    lora_sync: Literal["merged", "adapter"] = "merged",
    lora: dict[str, object] | None = None,
    **own: object,
) -> RolloutSpec:
    """lora: an adapter's fields of ModelConfig. own: arguments of the engine's own."""
    model = model_config(path, override_config=override_config or {}, **(lora or {}))
    rollout = RolloutConfig(
        name=name, n=1, do_sample=True, temperature=1.0, top_k=-1, top_p=1.0, ignore_eos=False, dtype=dtype,
        max_num_seqs=slots, balance=balance, max_model_len=max_model_len, tensor_model_parallel_size=tensor_model_parallel_size,
        gpu_memory_utilization=0.5, max_num_batched_tokens=2048, enforce_eager=False, cudagraph_capture_sizes=None,
        enable_chunked_prefill=True, enable_prefix_caching=True, load_format="dummy", seed=42,
        engine_kwargs=EngineKwargsConfig(vllm=own, sglang=own), free_cache_engine=True,
        update_weights_bucket_megabytes=update_weights_bucket_megabytes, verify_weights=verify_weights,
        lora_sync=lora_sync,
        log_prob_micro_batch_size=None, log_prob_micro_batch_size_per_gpu=None,
        log_prob_use_dynamic_bsz=False, log_prob_max_token_len_per_gpu=1024,
        multi_turn=SINGLE_TURN, 
        agent=AgentConfig(
            num_workers=1, default_agent_loop=None, agent_loop_config_path=None, program=None, memory_limit_mb=None
        ),
        val_kwargs=SamplingConfig(n=1, do_sample=False, temperature=0.0, top_k=-1, top_p=1.0),
    )  # fmt: skip
    return RolloutSpec(model, rollout, max_model_len, "cpu")


def make_model(path: Path, architecture: str = "qwen2", **changes: object) -> PreTrainedModel:
    """A tiny model as transformers has it, saved in ``path``."""
    return AutoModelForCausalLM.from_pretrained(save_tiny_model(path, architecture, **changes)).eval()


def make_engine(model: PreTrainedModel, **settings: object) -> EmbeddedRollout:
    """An engine with the weights of ``model``, from the directory it was read from."""
    engine = EmbeddedRollout(spec_of(model.config._name_or_path, **settings))
    assert engine.share_weights(dict(model.named_parameters()), version=1)
    return engine


def ragged_prompts(count: int, longest: int = 40, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def request(
    id: int, prompt: Sequence[int], *, seed: int | None = None, response_ids: Sequence[int] = (), **sampling: object
) -> Request:
    plain: dict[str, object] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_tokens": 24, "stop_token_ids": (1,)}
    seed = 1000 + id if seed is None else seed
    return Request(id, tuple(prompt), Sampling(**(plain | sampling)), seed, tuple(response_ids))


@torch.no_grad()
def hf_logits(model: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """Logits of each token of the answer, one sequence at a time, no cache: (answer, V)."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
    return model(input_ids=ids[None], use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()


def log_prob_error(model: PreTrainedModel, request: Request, completion: Completion) -> float:
    """The largest difference between the engine's log-probs and those of plain transformers."""
    logits = hf_logits(model, request, completion) / (request.sampling.temperature or 1.0)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(completion.log_probs)).abs().max())


class ModelSource:
    """A trainer with the weights of ``model``; they are lent where ``lends``. streams: the dtype of each one asked for."""

    def __init__(self, model: PreTrainedModel, *, lends: bool = False) -> None:
        self.model, self.lends = model, lends
        self.streams: list[torch.dtype] = []
        self.given = 0

    def live_weights(self) -> dict[str, Tensor] | None:
        return dict(self.model.named_parameters()) if self.lends else None

    def export_weights(self, *, dtype: torch.dtype, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        self.streams.append(dtype)
        for name, weight in self.model.named_parameters():
            self.given += 1
            yield name, weight.detach()


def weight_sync(engine: Rollout, source: ModelSource, spec: RolloutSpec, mode: Literal["off", "sample", "full"]) -> WeightSync:
    return WeightSync(engine, cast(Any, source), replace(spec.rollout, verify_weights=mode), rank=0)


def spoil_loading(engine: Rollout, change: Callable[[str, Tensor], Tensor]) -> None:
    """What this engine loads from now on is changed on the way, when the trainer's side has let go of it."""

    def changed(load: Callable[..., None], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        load(((name, change(name, tensor)) for name, tensor in weights), version=version)

    engine.load_weights = partial(changed, partial(type(engine).load_weights, engine))  # type: ignore[method-assign]
    engine.load_adapter = lambda config, weights, version: changed(  # type: ignore[method-assign]
        partial(type(engine).load_adapter, engine, config), weights, version
    )


def load_unspoiled(engine: Rollout) -> None:
    for name in ("load_weights", "load_adapter"):
        vars(engine).pop(name, None)


def one_off(wanted: str, place: int, by: float = 0.1) -> Callable[[str, Tensor], Tensor]:
    """Changes one number of one tensor."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if name != wanted:
            return tensor
        changed = tensor.clone()
        changed.view(-1)[place] += by
        return changed

    return change
