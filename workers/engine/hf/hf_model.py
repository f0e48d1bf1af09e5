"""A transformers model that runs on packed rows and returns log-probs, values or scores instead of logits.

transformers provides the architecture, the weights' names and the files. Only its body is called. Attention is replaced by packed
attention (packed_attention.py), the language head by a chunked one (logprob.py). An architecture that does more in its head or
attention is detected by comparing a small twin with transformers' own forward (check_packing).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)
from transformers.utils import GENERATION_CONFIG_NAME

from configs.schema.common import Dtype, ModelConfig
from workers.engine.base import Head
from workers.engine.hf.moe_aux_loss import ROUTED, measure
from workers.engine.hf.packed_attention import PACKED_ATTENTION, PackedRows
from workers.engine.logprob import head_all_log_probs, head_entropy, head_log_probs, head_sum_pi_squared, head_top_log_probs
from workers.engine.stored_weights import StoredWeights, weight_files
from workers.model_path import model_path, no_directory, silence_hub

DTYPES: dict[Dtype, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
PLAIN_RMS_NORMS = {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")}
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
TWIN_WORDS, TWIN_NUMBERS = 64, 2**20 + 7  # of a small twin: size of the vocabulary; distinct random numbers, repeated as needed
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # rotation depends on the longest row of a pack


class PackedModel(nn.Module):
    """The complete transformers model ``hf`` with a packed forward; names, tied weights and files are those of ``hf``.

    The head runs in this module's forward, where a sharding engine has gathered its weight.
    """

    def __init__(self, hf: PreTrainedModel, head: Head) -> None:
        super().__init__()
        self.hf = hf
        self.head = head
        self.fused = False
        """Whether the language head is compiled, see head_log_probs."""
        body: PreTrainedModel = hf.base_model  # type: ignore[assignment] # a property without a type
        routed = "router_logits" in (body._can_record_outputs or {})
        self.top_k: int | None = hf.config.get_text_config().to_dict().get("num_experts_per_tok") if routed else None
        """Experts per token; None: the model has no routers."""

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers: each is recomputed by itself; FSDP gathers and frees units of one or more."""
        kinds = self.hf._no_split_modules or ()
        return [module for module in self.hf.modules() if type(module).__name__ in kinds]

    @property
    def value_head(self) -> nn.Linear:
        """H -> 1; ``score`` or ``classifier`` in transformers."""
        return next(child for child in self.hf.children() if isinstance(child, nn.Linear))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        rows: PackedRows,
        predicted: Tensor | None = None,
        temperature: float = 1.0,
        outputs: Collection[str] = ("log_probs",),
        sampled: Tensor | None = None,
        routed: int | None = None,
        routed_gradient: bool = False,
    ) -> dict[str, Tensor]:
        """Run the body on packed rows and the head on the tokens that need it.

        input_ids, positions: int64 (T,); positions start at 0 in each row. predicted: int64 (N,), tokens whose log-probs are
        wanted, never the first of a row; a value head computes all tokens, a reward head the last of each row. If ``rows`` are
        split over ranks, all ranks pass the same T tokens and return the same results. If prefixes are shared, T still counts all
        tokens of all rows. sampled: int64 (M,), those of the predicted for the output sampled_entropy.
        routed: number of leading tokens for which router statistics are computed; None: none. routed_gradient: whether they have
        a gradient.

        Returns, at least in float32: log_probs and the other ``outputs``, 0 where not predicted; or values (T,), of the state
        before each token, 0 for the first of a row, and last_value (B,), of the state after each row; or scores (B,), of that
        state. With ``routed`` also ROUTED, see moe_aux_loss.measure.
        """
        routing_kwargs = {"output_router_logits": True} if routed is not None else {}
        body = self.hf.base_model(
            input_ids=rows.own(input_ids)[None],
            position_ids=rows.own(positions)[None],
            use_cache=False,
            packed_rows=rows,
            **routing_kwargs,
        )
        hidden, routing = body.last_hidden_state[0], {}
        if routed is not None:
            assert self.top_k is not None, "routers alone do that"
            logits = (rows.whole(layer if routed_gradient else layer.detach())[:routed] for layer in body.router_logits)
            routing = dict(zip(ROUTED, measure(logits, self.top_k), strict=True))
        if self.head != "lm":
            # The head is sharded without a mixed-precision policy and computes in its parameters' dtype.
            after = rows.whole(self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0])
            last = after.index_select(0, rows.last)
            if self.head == "reward":
                return routing | {"scores": last}
            # The head computes the value after each token: shift by one for the state before it.
            return routing | {"values": torch.where(positions == 0, 0.0, after.roll(1)), "last_value": last}
        assert predicted is not None, "a language head wants to know which tokens"
        total = len(input_ids)
        targets, before = rows.before(predicted, total)
        if sampled is not None and rows.cut is not None:
            # This rank predicts some of them.
            wanted = torch.zeros(total, dtype=torch.bool, device=predicted.device).index_fill(0, predicted[sampled], True)
            sampled = wanted[targets].nonzero()[:, 0]
        found = self._language_head(hidden.index_select(0, before), input_ids[targets], temperature, outputs, sampled)
        return routing | {name: rows.answers(out, targets, total) for name, out in found.items()}

    def _language_head(
        self, before: Tensor, targets: Tensor, temperature: float, outputs: Collection[str], sampled: Tensor | None
    ) -> dict[str, Tensor]:
        """before (N, H), targets int64 (N,), sampled int64 (M,) -> log_probs (N,) and the other ``outputs``."""
        # Only its weight is used: the module's own forward would materialise all logits.
        lm_head = self.hf.get_output_embeddings()
        weight, bias = lm_head.weight, lm_head.bias
        want_entropy = "entropy" in outputs
        log_probs, entropy = head_log_probs(
            before, weight, bias, targets, temperature=temperature, want_entropy=want_entropy, fused=self.fused
        )
        found = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
        if "sampled_entropy" in outputs:
            assert sampled is not None, "see TrainEngine.train_step"
            found["sampled_entropy"] = head_entropy(before, weight, bias, sampled, temperature=temperature)
        if "sum_pi_squared" in outputs:
            found["sum_pi_squared"] = head_sum_pi_squared(before, weight, bias, temperature=temperature)
        if "top_log_probs" in outputs:
            found["top_log_probs"] = head_top_log_probs(before, weight, bias, temperature=temperature)
        if "all_log_probs" in outputs:
            found["all_log_probs"] = head_all_log_probs(before, weight, bias, temperature=temperature)
        return found


def model_files(model: ModelConfig) -> str:
    """Directory of the weights; a hub model is downloaded."""
    path = model_path(model)
    return path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])


def model_config(model: ModelConfig, head: Head) -> PretrainedConfig:
    """Load config.json with ``override_config``. Raises ValueError for an unknown key or an unsupported architecture."""
    path = model_path(model)
    silence_hub()
    try:
        config, unknown = AutoConfig.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, return_unused_kwargs=True, **model.override_config
        )
    except OSError as error:  # the message of transformers has many lines: quote the first
        problem = f"{str(error).splitlines()[0].rstrip('.')}; give a directory, or a hub name that is in reach or in its cache"
        raise ValueError(f"model.path={model.path}: {no_directory(path)}, and as a hub name: {problem}") from error
    except ValueError as error:
        check_own_code(model.path, error)
        raise ValueError(f"model.path={model.path}: {str(error).splitlines()[0]}; take another model or transformers") from error
    unknown.pop("trust_remote_code", None)
    if unknown:
        raise ValueError(
            f"model.override_config: {', '.join(unknown)} not in the config of {model.path} ({config.model_type}); take its names"
        )
    if head == "reward":
        prepare_scoring(model.path, config)
    if head != "lm":
        # One output: transformers' default is two labels.
        config.num_labels = 1
    as_dict = config.to_dict()
    layers = set(as_dict.get("layer_types") or ()) - PACKABLE_LAYERS
    rope = (as_dict.get("rope_parameters") or {}).get("rope_type")
    refused = [*sorted(layers), *([f"{rope} rope"] if rope in LENGTH_DEPENDENT_ROPE else [])]
    if refused:
        raise ValueError(f"model.path={model.path}: {config.model_type} cannot be packed: it has {', '.join(refused)}")
    return config


def prepare_scoring(path: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a classifier with several labels; unset a padding token that is also an end-of-sequence token.

    transformers scores the last token that is not padding, and would skip the end of a row.
    """
    made = (config.architectures or [""])[0]
    if made.endswith("Classification") and config.num_labels != 1:
        raise ValueError(f"model.path={path}: a {made} with {config.num_labels} labels; a reward model has one, take such a one")
    text = config.get_text_config()
    if text.pad_token_id in (text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]):
        text.pad_token_id = None


def check_own_code(path: str, error: ValueError) -> None:
    """Raise ValueError, with the key to set, if ``error`` means that the model at ``path`` contains its own code."""
    if "trust_remote_code=True" in str(error):
        raise ValueError(
            f"{path} comes with code of its own, which is not run unless model.trust_remote_code=true is set next to its "
            "model.path; read the code first"
        ) from error


def vocab_size(model: ModelConfig) -> int:
    """V of the language model: rows of its embedding."""
    return int(model_config(model, "lm").get_text_config().vocab_size)


def empty_model(model: ModelConfig, config: PretrainedConfig, head: Head, dtype: torch.dtype) -> PackedModel:
    """Build the model on the meta device: names and shapes without memory.

    Raises ValueError for a model whose attention or state cannot be packed, and for an auxiliary loss without routers.
    """
    with torch.device("meta"):
        hf = auto_class(config, head).from_config(
            config, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=model.trust_remote_code
        )
    if not hf._supports_attention_backend or hf._is_stateful:
        raise ValueError(f"model.path={model.path}: {config.model_type} cannot be packed: its attention or state is its own")
    # eval(): without dropout the ratio is 1 on policy, and recomputation repeats the forward bitwise.
    packed = PackedModel(fuse_norms(choose_experts(hf.eval())), head)
    if model.router_aux_loss_coef and packed.top_k is None:
        coefficient = f"model.router_aux_loss_coef={model.router_aux_loss_coef:g}"
        raise ValueError(f"{coefficient}: {model.path} ({config.model_type}) has no routers to balance; leave it at 0")
    return packed


def choose_experts(hf: PreTrainedModel) -> PreTrainedModel:
    """Select the implementation of experts: grouped_mm of torch, the default, does not support float64; the loop does."""
    if hf.dtype == torch.float64:
        hf.set_experts_implementation("eager")
    return hf


def fuse_norms(hf: PreTrainedModel) -> PreTrainedModel:
    """Run RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) in one kernel on CUDA.

    transformers uses five kernels and keeps their float32 results: 6.5 % of a step at 7B on an H200, and 7 GB. The fused kernel
    rounds once instead of twice.
    """
    for module in hf.modules():
        if type(module).__name__ in PLAIN_RMS_NORMS:
            module.__class__ = _fused_norm(type(module))  # type: ignore[arg-type] # a class is hashable
    return hf


@cache
def _fused_norm(norm: type[nn.Module]) -> type[nn.Module]:
    """Subclass that is fused on CUDA; one for all norms of a class.

    torch.compile guards a method set on a module by its identity, so that each layer would need a graph of its own.
    """

    class FusedNorm(norm):  # type: ignore[misc, valid-type] # a variable base
        def forward(self, hidden: Tensor) -> Tensor:
            if not hidden.is_cuda:
                return super().forward(hidden)
            return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    return FusedNorm


def stored_weights(packed: PackedModel, model: ModelConfig) -> StoredWeights:
    """Locate the weights of the empty model in its files. Raises ValueError for missing or mismatched weights.

    A value or reward head that the checkpoint does not have starts at zero: so do its outputs, and no random state is needed.
    """
    weights = StoredWeights(packed.hf, weight_files(model), f"model.path={model.path}")
    own = [] if packed.head == "lm" else [name for name in weights.missing if not _in_body(packed.hf, name)]
    if missing := sorted(set(weights.missing) - set(own)):
        raise ValueError(f"model.path={model.path}: {len(missing)} weights are not there, such as {missing[0]}")
    return weights


def _in_body(hf: PreTrainedModel, name: str) -> bool:
    """Whether a weight belongs to the body, not to a head."""
    return name.startswith(f"{hf.base_model_prefix}.")


def description(model: ModelConfig, config: PretrainedConfig, head: Head, weights: StoredWeights) -> PreTrainedModel:
    """Meta-device model that defines names in files and the generation config, as transformers would write them."""
    hf = empty_model(model, config, head, torch.float32).hf
    # save_pretrained inverts them: files keep the names that the model was loaded from.
    hf._weight_conversions = weights.conversions  # type: ignore[assignment] # a plain attribute
    keep_generation_config(hf, weights.folder)
    return hf


class KeptGenerationConfig(GenerationConfig):
    """Generation config that is written as it was read.

    transformers reads sampling parameters without do_sample=true with a warning, and refuses to write them: a run would end at
    its first checkpoint.
    """

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        super().validate(user_set_attributes=user_set_attributes)


def keep_generation_config(hf: PreTrainedModel, folder: Path) -> None:
    """Give a language model the generation config of the files in ``folder``, if they have one."""
    if hf.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file():
        hf.generation_config = KeptGenerationConfig.from_pretrained(folder)


def make_buffers(hf: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    """Create the non-persistent buffers, such as rotary frequencies, on ``device`` and return them by name.

    No file has them, and on the meta device they have no values, so transformers' own initialisation computes them anew. Raises
    ValueError if it leaves one out: buffers are filled with NaN before.
    """
    owners = {}
    for name, buffer in hf.named_non_persistent_buffers():
        path, _, leaf = name.rpartition(".")
        owners[path] = hf.get_submodule(path)
        value = torch.empty_like(buffer, device=device)
        owners[path]._buffers[leaf] = value.fill_(torch.nan) if value.is_floating_point() else value.zero_()
    for owner in owners.values():
        hf._init_weights(owner)
    made: dict[str, Tensor] = dict(hf.named_non_persistent_buffers())
    for name, buffer in made.items():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ValueError(f"transformers does not say how to compute the buffer {name} of {type(hf).__name__}")
    return made


def small_twin(model: ModelConfig, config: PretrainedConfig, head: Head) -> PackedModel:
    """A small model of the same architecture on the CPU, float32, with random weights, for check_packing.

    It has the first layers, as many as are needed to have each kind of layer, and a small vocabulary. All experts of a layer
    share the memory of one. Weights are large enough to make attention and logits far from uniform, so that caps and scales have
    an effect.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = text.to_dict().get("layer_types") or ["all alike"]
    text.num_hidden_layers = 1 + max(kinds.index(kind) for kind in kinds)
    if "layer_types" in text.to_dict():
        text.layer_types = kinds[: text.num_hidden_layers]
    text.vocab_size = min(text.vocab_size, TWIN_WORDS)
    if (text.pad_token_id or 0) >= text.vocab_size:
        text.pad_token_id = None
    packed = empty_model(model, config, head, torch.float32)
    packed.hf.set_experts_implementation("eager")
    numbers = torch.rand(TWIN_NUMBERS, generator=torch.Generator().manual_seed(0))
    for module in packed.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                module._parameters[leaf] = nn.Parameter(_random_tensor(param.shape, numbers), requires_grad=False)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                module._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
    # Every parameter was replaced, which breaks ties.
    packed.hf.tie_weights()
    make_buffers(packed.hf, torch.device("cpu"))
    return packed


def _random_tensor(shape: torch.Size, numbers: Tensor) -> Tensor:
    """Random tensor: vectors in [0.5, 1.5], matrices of standard deviation 2 / sqrt(columns), repeated in further dimensions."""
    if len(shape) > 2:
        return _random_tensor(shape[1:], numbers).expand(shape)
    count = shape.numel()
    values = numbers.repeat(-(-count // len(numbers)))[:count].view(shape)
    # A uniform number in [-0.5, 0.5] has the standard deviation 1 / sqrt(12).
    return values + 0.5 if len(shape) < 2 else (values - 0.5) * (2 * 12**0.5 / shape[-1] ** 0.5)


@torch.no_grad()
def check_packing(model: PackedModel, path: str) -> None:
    """Check that two short packed rows give the same results as each row alone in transformers. model: see small_twin.

    It detects what a list of architectures could not: scaled or capped logits, own attention, state across rows. Raises
    ValueError.
    """
    hf, text = model.hf, model.hf.config.get_text_config()
    rows = [(torch.arange(n) * 7 + n + (text.pad_token_id or 0)) % text.vocab_size for n in (5, 3)]  # none ends with padding
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = model(torch.cat(rows), positions, PackedRows.of(lengths, positions.device), positions.nonzero()[:, 0])
    # The packed forward is done; the reference runs transformers' own attention on the same weights.
    hf.set_attn_implementation("eager")
    (name, results), *_ = packed.items()
    for row, result in zip(rows, results.split(1 if name == "scores" else lengths), strict=True):
        logits = hf(input_ids=row[None], use_cache=False).logits
        match name:
            case "scores":
                difference = float((result - logits.flatten()[-1]).abs())
            case "values":
                difference = float((result[1:] - logits[0, :-1, 0]).abs().max())
            case _:
                expected = logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
                difference = float((result[1:] - expected).abs().max())
        # Negated: a NaN fails too.
        if not difference < 1e-3:
            raise ValueError(
                f"model.path={path}: {hf.config.model_type} is not supported: its head or attention does something more, "
                f"packed rows differ from transformers' own by {difference:.2g}"
            )


def write_description(model: PreTrainedModel, directory: Path) -> list[str]:
    """Write config.json and, for a language model, generation_config.json. Returns the file names.

    With weights and a tokenizer they make a model directory.
    """
    model.config.dtype = model.dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if not model.can_generate():
        return ["config.json"]
    model.generation_config.save_pretrained(directory)
    return ["config.json", "generation_config.json"]


def active_parameters(parameters: Mapping[str, Tensor], top_k: int | None) -> int:
    """Number of parameters that a token passes: ``top_k`` of the E experts of a layer, (E, ..., ...)."""
    return sum(
        param.numel() * top_k // len(param) if top_k is not None and ".experts." in name else param.numel()
        for name, param in parameters.items()
    )


def model_flops(
    config: PretrainedConfig, head: Head, n_params: int, lengths: Sequence[int], *, backward: bool, n_trained: int | None = None
) -> float:
    """Model FLOPs of rows of these lengths, see TrainEngine.flops.

    The embedding is a lookup and counts only if it is the head too. The head counts for every token, as is customary, although
    only response tokens pass it here. Attention is causal: half of each square. n_trained: number of trained parameters, None for
    all; frozen ones have no weight gradient, which leaves 4 of 6.
    """
    text = config.get_text_config()
    if not (head == "lm" and text.tie_word_embeddings):
        n_params -= text.vocab_size * text.hidden_size
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    pair = 2 * text.num_hidden_layers * text.num_attention_heads * head_dim
    forward = sum(2.0 * n_params * length + pair * length * length for length in lengths)
    if not backward:
        return forward
    n_frozen = 0 if n_trained is None else n_params - n_trained
    return 3 * forward - 2.0 * n_frozen * sum(lengths)


def scores_tokens(config: PretrainedConfig, head: Head) -> bool:
    """Whether the model is a token classifier, whose head has a bias: a critic, or a reward model saved as one."""
    return head == "value" or (head == "reward" and (config.architectures or [""])[0].endswith("ForTokenClassification"))


AutoClass = type[AutoModelForCausalLM | AutoModelForTokenClassification | AutoModelForSequenceClassification]


def auto_class(config: PretrainedConfig, head: Head) -> AutoClass:
    """Auto class of transformers for a head: a critic is a token classifier with one label, a reward model a sequence classifier.

    A reward model saved as a token classifier stays one. If transformers has no such class for a body, one is created from its
    generic mix-in.
    """
    if head == "lm":
        return AutoModelForCausalLM
    auto: Any = AutoModelForSequenceClassification
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    generic: type = GenericForSequenceClassification
    if scores_tokens(config, head):
        auto, known = AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        generic = GenericForTokenClassification
    kind = type(config)
    if kind not in known and kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[kind]  # type: ignore[assignment] # never a tuple here
        name = causal.__name__.replace("ForCausalLM", generic.__name__.removeprefix("Generic"))
        own = {"base_model_prefix": causal.base_model_prefix}
        made = type(name, (generic, causal.__bases__[0]), own)
        auto.register(kind, made, exist_ok=True)  # without exist_ok transformers ignores a class for its own configs
    chosen: AutoClass = auto
    return chosen
