"""Memory model of the FSDP engine: bytes on one GPU for a row of T tokens, term by term.

Problem: the longest context that fits a GPU should be known without running out of memory first. Idea: list every tensor that is
alive at each moment at which memory can peak (language head, first and last layer of the backward, reduction of the root's
gradients, optimizer step), and take the largest sum. Scope: decoders like Qwen2 (RMSNorm in float32, grouped-query attention, an
MLP of gate, up and down), layers recomputed in the backward pass, one micro-batch of one row. All sizes are bytes on one rank;
1 GB is 10^9 bytes. `scripts/bench/context.py` compares the model with measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.engine.fsdp.units import layers_per_unit
from workers.engine.logprob import backward_chunk_size, chunk_size

FLOAT32 = 4
Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a decoder, as in transformers' configs. tied: the language head shares the embedding's weights.

    intermediate: width of the dense MLP of a layer, or of its shared experts. experts: routed experts of a layer, each of width
    ``expert_width``, of which a token passes ``active``. Times cover experts, memory only their parameters.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    experts: int = 0
    active: int = 0
    expert_width: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a transformers config as a dict that contains all of these keys; head_dim may be missing."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", hidden // heads),
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=config["tie_word_embeddings"],
            experts=config.get("num_experts", 0),
            active=config.get("num_experts_per_tok", 0),
            expert_width=config.get("moe_intermediate_size", 0),
        )

    @property
    def queries(self) -> int:
        """Width of q and of the attention output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of k and of v, each."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: q, k, v with biases, o; gate, up, down; two norms."""
        attention = 2 * self.hidden * (self.queries + self.keys) + self.queries + 2 * self.keys
        mlps = 3 * self.hidden * (self.intermediate + self.experts * self.expert_width) + self.hidden * self.experts
        return attention + mlps + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters of embedding, final norm and, unless tied, language head: gathered with the root until the step ends."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def stage_parameters(self, stages: int) -> int:
        """Parameters of the largest pipeline stage, the last: it has the norm and the head, if tied a copy of the embedding."""
        if stages == 1:
            return self.parameters
        return -(-self.layers // stages) * self.layer_parameters + self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True, slots=True)
class Setting:
    """Engine settings that affect memory.

    gpus: number of GPUs over which parameters are sharded. sp: Ulysses ranks that share a row. kept, compute: bytes per number in
    model_dtype and dtype. trained: all weights are trained; False: frozen base, as under LoRA, whose adapter is not counted.
    several: a step has more than one micro-batch. no_sync: gradients are reduced over GPUs only in the last micro-batch. gqa: the
    attention kernel accepts fewer key heads than query heads. offload: enable_activation_offload of the model. pieces: num_shards
    of its tiled_mlp; 1 without it. seen: keys that attention gathers per computed token, 1 unless rows share prefixes. recompute:
    layers are recomputed in the backward pass. cuda: False: the CPU's kernels: RMSNorm is not one
    kernel, and a log-sum-exp keeps no exponentials. fused: the head is compiled: its logits are in the compute dtype alone.
    """

    gpus: int = 1
    sp: int = 1
    kept: int = 4
    compute: int = 2
    trained: bool = True
    optimizer_offload: bool = False
    several: bool = False
    no_sync: bool = False
    gqa: bool = True
    offload: bool = False
    pieces: int = 1
    seen: float = 1.0
    recompute: bool = True
    cuda: bool = True
    fused: bool = False

    @property
    def wrapped(self) -> bool:
        """Whether FSDP gathers and casts: not on one rank that computes in its parameters' own dtype (sharding.shard)."""
        return self.gpus > 1 or self.kept != self.compute

    @property
    def unsharded(self) -> bool:
        """Whether every GPU holds unsharded gradients of earlier micro-batches."""
        return self.several and self.no_sync


def parameters(shape: Shape, setting: Setting) -> float:
    """Bytes of this rank's parameter shard, in model_dtype."""
    return setting.kept * shape.parameters / setting.gpus


def moments(shape: Shape, setting: Setting) -> float:
    """Bytes of AdamW's two moments, in model_dtype; 0 for a frozen model."""
    return 2 * setting.kept * shape.parameters / setting.gpus if setting.trained else 0.0


def gradients(shape: Shape, setting: Setting, layers_left: float) -> float:
    """Bytes of gradients while ``layers_left`` decoder layers have not run their backward pass yet.

    One micro-batch: a layer's gradients appear, sharded, when its backward pass ends. Several micro-batches: the sums of earlier
    ones exist from the start, either sharded in at least float32, and each layer's new gradients are added to them on arrival, or
    unsharded in float32 (see Setting.unsharded).
    """
    if not setting.trained:
        return 0.0
    if setting.unsharded:
        return float(FLOAT32 * shape.parameters)
    if setting.several:
        arriving = 0.0 if setting.kept >= FLOAT32 else setting.kept * (shape.layers - layers_left) * shape.layer_parameters
        return (max(setting.kept, FLOAT32) * shape.parameters + arriving) / setting.gpus
    return setting.kept * (shape.layers - layers_left) * shape.layer_parameters / setting.gpus


def unit_parameters(shape: Shape) -> int:
    """Parameters of the decoder layers that FSDP gathers and reduces together."""
    return min(shape.layers, layers_per_unit(shape.layer_parameters)) * shape.layer_parameters


def gathered(shape: Shape, setting: Setting, units: int) -> float:
    """Bytes of gathered or cast weights in the compute dtype: root and ``units`` units of layers (one in use, one prefetched)."""
    layers = min(shape.layers * shape.layer_parameters, units * unit_parameters(shape))
    return setting.compute * (shape.root_parameters + layers) if setting.wrapped else 0.0


def head_gradient(shape: Shape, setting: Setting) -> float:
    """Bytes of the language head's unsharded gradient, in the compute dtype.

    It is reduced together with the embedding's, at the end of the backward pass. 0 if ``gradients`` counts unsharded ones.
    """
    return setting.compute * shape.vocabulary * shape.hidden if setting.trained and not setting.unsharded else 0.0


def reducing(shape: Shape, setting: Setting) -> float:
    """Bytes of one unit's float32 gradients during reduce-scatter, kept until the next unit's follow.

    Includes the gradients of the unit's other layers in the compute dtype, which wait for its last one.
    """
    waiting = setting.compute * (unit_parameters(shape) - shape.layer_parameters)
    return FLOAT32 * unit_parameters(shape) + waiting if setting.trained and setting.wrapped else 0.0


def layer_inputs(shape: Shape, setting: Setting, layers: float) -> float:
    """Bytes per token that ``layers`` layers keep: their inputs if recomputed; of one layer with activation offload.

    Not recomputed: inputs and outputs of two norms (on the CPU also the normalised input, see ``norms``), gate, its activation,
    up and their product, and attention's tensors.
    """
    if not setting.recompute:
        of_norms = setting.compute * 4 * shape.hidden if setting.cuda else norms(shape, setting)
        return layers * (of_norms + setting.compute * 4 * shape.intermediate + attention_kept(shape, setting))
    return setting.compute * shape.hidden * (min(layers, 1) if setting.offload else layers)


def rotary(shape: Shape, setting: Setting) -> float:
    """Bytes per token of cos and sin, shared by all layers."""
    return 2 * setting.compute * shape.head_dim


def norms(shape: Shape, setting: Setting) -> float:
    """Bytes per token that a layer's two RMSNorms keep for the backward pass: float32 input, normalised input, output."""
    return 2 * shape.hidden * (FLOAT32 + 2 * setting.compute)


def attention_kept(shape: Shape, setting: Setting) -> float:
    """Bytes per token that attention keeps for the backward pass: q, k, v, output, and the float32 log-sum-exp of each head.

    Ulysses exchanges tokens for heads, which keeps the total size, except that key heads are repeated if fewer than ranks. Rows
    that share a prefix each have a copy of its keys and values. The CPU joins the outputs of rows of different lengths, and keeps
    both.
    """
    repeated = max(1.0, setting.sp / shape.kv_heads)
    keys = (shape.keys * repeated if setting.gqa else shape.queries) * setting.seen
    return setting.compute * ((2 if setting.cuda else 3) * shape.queries + 2 * keys) + FLOAT32 * shape.heads


def norm_backward(shape: Shape, setting: Setting) -> float:
    """Bytes per token in the backward pass of the norm before the MLP, while the other norm's tensors are kept.

    The norm's float32 input and five more tensors of that size, and the gradient of the residual connection.
    """
    return shape.hidden * (6 * FLOAT32 + setting.compute) + norms(shape, setting) / 2


def mlp_backward(shape: Shape, setting: Setting) -> float:
    """Bytes per token at the MLP's peak in the backward pass.

    Gate, its activation, up, and three gradients of that size: 6 I, for one piece of the tokens; the incoming gradient; with
    several pieces also the complete outgoing gradient.
    """
    states = 1 if setting.pieces == 1 else 2
    return setting.compute * (6 * shape.intermediate / setting.pieces + states * shape.hidden)


def mlp_gradients(shape: Shape, setting: Setting) -> float:
    """Bytes of weight gradients at the MLP's peak: down's, unsharded; with several pieces also float32 sums of all three."""
    if not setting.trained:
        return 0.0
    sums = 0 if setting.pieces == 1 else 3 * FLOAT32
    return (sums + setting.compute) * shape.hidden * shape.intermediate


def head_chunk(shape: Shape, setting: Setting) -> float:
    """Bytes of one chunk of logits in the head's backward pass (workers/engine/logprob.py): compute dtype and float32.

    The gradient overwrites the float32 logits. Compiled: the product and its gradient, in the compute dtype.
    """
    bytes_per_logit = 2 * setting.compute if setting.fused else FLOAT32 + setting.compute
    return bytes_per_logit * backward_chunk_size(shape.vocabulary, shape.hidden, fused=setting.fused) * shape.vocabulary


def head_forward_chunk(shape: Shape, setting: Setting) -> float:
    """Bytes of one chunk of logits in the head's forward pass: float32, with their source or, on CUDA, exponentials."""
    if setting.fused:
        return setting.compute * chunk_size(shape.vocabulary, fused=True) * shape.vocabulary
    cast = setting.compute if setting.compute < FLOAT32 else 0
    return (FLOAT32 + (FLOAT32 if setting.cuda else cast)) * chunk_size(shape.vocabulary) * shape.vocabulary


def head_backward(shape: Shape, setting: Setting) -> float:
    """Bytes per token in the head's backward pass.

    The final norm's float32 input, normalised input and output, the states that the head reads, and their gradient.
    """
    return shape.hidden * (FLOAT32 + 4 * setting.compute)


def columns(shape: Shape, setting: Setting) -> float:
    """Bytes per token of the batch's columns, for the complete row on every rank: 20 numbers of 8 bytes.

    Token ids, masks, weights, old and new log-probs, advantages and gradients. Each row has its own, also of a shared prefix.
    """
    return 20 * 8.0 * setting.seen


def layer_forward(shape: Shape, setting: Setting) -> float:
    """Bytes per token in a layer's forward pass without gradient: the larger of MLP and attention.

    MLP: activation, up and their product, and four states (embedding, layer input, attention's sum, norm). Attention: four times
    the width of q, k, v, and three states.
    """
    mlp = 3 * shape.intermediate / setting.pieces + (4 if setting.pieces == 1 else 5) * shape.hidden
    return setting.compute * max(mlp, 4 * shape.queries + 2 * shape.keys * setting.seen + 3 * shape.hidden)


def resident(shape: Shape, setting: Setting) -> Parts:
    """Bytes by part that stay on the GPU between steps."""
    return {
        "parameters": parameters(shape, setting),
        "moments": 0.0 if setting.optimizer_offload else moments(shape, setting),
    }


def in_layer(shape: Shape, setting: Setting, row: float, layers_left: int) -> Parts:
    """Bytes by part in a layer's backward pass: in its MLP or in the norm before it, whichever needs more.

    row: tokens of the row; this rank holds 1 / sp of them. layers_left: layers whose inputs are still kept, including this one.
    """
    tokens = row / setting.sp
    attention = attention_kept(shape, setting) + rotary(shape, setting)
    whole = 3 * setting.compute * shape.hidden * shape.intermediate if setting.trained else 0.0
    in_mlp = (mlp_gradients(shape, setting), norms(shape, setting) + attention, mlp_backward(shape, setting))
    in_norm = (whole, norm_backward(shape, setting) + attention, 0.0)
    if not setting.recompute:
        # What the layer kept is among the layer inputs: gate, its activation, up and their product, which is freed by then.
        states = 2 * shape.intermediate / setting.pieces + shape.hidden
        in_mlp = (mlp_gradients(shape, setting), rotary(shape, setting), setting.compute * states)
        freed = setting.compute * 4 * shape.intermediate
        in_norm = (whole, norm_backward(shape, setting) - norms(shape, setting) + rotary(shape, setting) - freed, 0.0)
    # Weight gradients do not grow with the tokens, so which of the two needs more depends on the length of the row.
    of_weights, kept, mlp = max(in_mlp, in_norm, key=lambda most: most[0] + tokens * (most[1] + most[2]))
    return {
        **resident(shape, setting),
        "gradients": gradients(shape, setting, layers_left) + head_gradient(shape, setting) + of_weights,
        "gathered": gathered(shape, setting, 2) + reducing(shape, setting),
        "layer inputs": tokens * layer_inputs(shape, setting, layers_left),
        "norms, attention": tokens * kept,
        "MLP": tokens * mlp,
        "head, columns": row * columns(shape, setting),
    }


def in_head(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part in the language head: in its backward or forward pass, whichever needs more.

    The backward pass accumulates the head's gradient in float32 and then copies it to the compute dtype.
    """
    tokens = row / setting.sp
    summed = (FLOAT32 + setting.compute) * shape.vocabulary * shape.hidden if setting.trained else 0.0
    chunk, forward = head_chunk(shape, setting), head_forward_chunk(shape, setting)
    if forward > chunk + summed:
        # The forward pass has no gradient of the head.
        chunk, summed = forward, 0.0
    return {
        **resident(shape, setting),
        "gradients": summed + (gradients(shape, setting, shape.layers) if setting.several else 0.0),
        "gathered": gathered(shape, setting, 2),
        "layer inputs": tokens * layer_inputs(shape, setting, shape.layers),
        "norms, attention": tokens * rotary(shape, setting),
        "MLP": 0.0,
        "head, columns": chunk + tokens * head_backward(shape, setting) + row * columns(shape, setting),
    }


def in_reduction(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part at the end of the backward pass, when the root's gradients are reduced in float32.

    Only the batch's columns grow with the row here.
    """
    root = shape.root_parameters if setting.trained else 0
    # The gradients in the compute dtype, their float32 copy, and the reduced float32 shard.
    crossing = root * (setting.compute + (FLOAT32 + FLOAT32 / setting.gpus if setting.wrapped else 0))
    return {
        **resident(shape, setting),
        "gradients": gradients(shape, setting, 0) + crossing,
        "gathered": gathered(shape, setting, 1),
        "layer inputs": 0.0,
        "norms, attention": 0.0,
        "MLP": 0.0,
        "head, columns": row * columns(shape, setting),
    }


def at_optimizer(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part in the optimizer step: parameters, gradients and moments, all sharded; fused AdamW works in place."""
    return {
        "parameters": parameters(shape, setting),
        "moments": moments(shape, setting),
        "gradients": setting.kept * shape.parameters / setting.gpus if setting.trained else 0.0,
        "gathered": 0.0,
        "layer inputs": 0.0,
        "norms, attention": 0.0,
        "MLP": 0.0,
        "head, columns": row * columns(shape, setting),
    }


def training(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part at the peak of a train step."""
    return max((parts for parts, _ in moments_of(shape, setting, row)), key=lambda parts: sum(parts.values()))


def moments_of(shape: Shape, setting: Setting, row: float) -> list[tuple[Parts, float]]:
    """Bytes by part at each moment at which memory can peak, and how many of them FSDP's reduction stream has allocated.

    These are reduced gradients, and at the end the float32 copy of the root's.
    """
    # Of the layers, the first and the last are enough: from layer to layer, inputs are freed and gradients appear at constant
    # rates, so the sum is linear in the number of layers and largest at one end.
    layers = shape.layers
    arrived = setting.kept * shape.parameters / setting.gpus if setting.trained else 0.0
    begun = arrived if setting.several and not setting.unsharded and setting.kept >= FLOAT32 else 0.0
    layer = 0.0 if setting.unsharded or begun or not setting.trained else setting.kept * shape.layer_parameters / setting.gpus
    # Where gradients of earlier micro-batches are there already, the reduced root is a tensor of its own until it is added.
    root = FLOAT32 * shape.root_parameters * (1 + (1 / setting.gpus if begun else 0)) if setting.trained else 0.0
    return [
        (in_head(shape, setting, row), begun),
        (in_layer(shape, setting, row, layers), begun),
        (in_layer(shape, setting, row, 1), begun + (layers - 1) * layer),
        (in_reduction(shape, setting, row), arrived + root),
        (at_optimizer(shape, setting, row), arrived),
    ]


def reserved(shape: Shape, setting: Setting, row: float) -> float:
    """Bytes that torch's allocator holds at the end of a train step: each stream's peak, because its cache is per stream.

    What the reduction stream had is not reused for activations (snapshots on an H200: docs/performance.md).
    """
    moments = moments_of(shape, setting, row)
    # The two peaks are at different moments: their sum is more than what is allocated at any one.
    return max(sum(parts.values()) - reduced for parts, reduced in moments) + max(reduced for _, reduced in moments)


def gathering(shape: Shape, setting: Setting) -> float:
    """Bytes that FSDP's all-gather stream keeps cached: buffers of the root and of one unit, in the compute dtype."""
    return setting.compute * (shape.root_parameters + unit_parameters(shape)) if setting.gpus > 1 else 0.0


def scoring(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part at the peak of a forward pass without gradient: within a layer or within the head."""
    tokens = row / setting.sp
    here = {**resident(shape, setting), "gathered": gathered(shape, setting, 2)}
    head = head_forward_chunk(shape, setting) + tokens * 3 * setting.compute * shape.hidden
    mlp = tokens * (layer_forward(shape, setting) + rotary(shape, setting))
    most = {"MLP": mlp, "head, columns": 0.0} if mlp > head else {"MLP": 0.0, "head, columns": head}
    return {**here, **most, "head, columns": most["head, columns"] + row * columns(shape, setting)}


def longest(phase: Callable[[Shape, Setting, float], Parts], shape: Shape, setting: Setting, usable: float) -> int:
    """The longest row, in tokens, for which ``phase`` (training, scoring) needs at most ``usable`` bytes; 0 if none fits."""
    # Bisection: memory never decreases with the length of the row.
    low, high = 0, 1 << 28
    while low < high:
        middle = (low + high + 1) // 2
        if sum(phase(shape, setting, middle).values()) <= usable:
            low = middle
        else:
            high = middle - 1
    return low
