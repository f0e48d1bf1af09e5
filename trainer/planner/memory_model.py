"""How much memory a row of T tokens takes on one GPU of the FSDP engine: a model in plain arithmetic, term by term.

Decoders of Qwen2's kind: RMSNorm in float32, attention with fewer key heads, an MLP of gate, up and down; layers recomputed
in the backward. One micro-batch of one row. Bytes on one rank; 1 GB is 10^9 bytes. `scripts/bench/context.py` sets it
beside what a device measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.engine.logprob import backward_chunk_size, chunk_size

FLOAT32 = 4
Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder, by the names of transformers' configs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """config: as transformers has it, all of these said."""
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
        )

    @property
    def queries(self) -> int:
        """Width of q, and of what attention answers."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of k, and of v."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer: q, k, v with biases, o; gate, up, down; two norms."""
        attention = 2 * self.hidden * (self.queries + self.keys) + self.queries + 2 * self.keys
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Embedding, final norm and, unless tied, the language head: gathered with the root, and kept until the step's end."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine holds the model, and what of it is trained.

    gpus: over which parameters are sharded. sp: Ulysses ranks a row is cut over. kept, compute: bytes of a number in
    model_dtype and dtype. trained: all weights; False: a frozen base, as under LoRA, whose adapter is left out of the
    count. several: a step has more than one micro-batch; no_sync: their gradients are reduced over GPUs in the last
    one only. gqa: attention's kernel takes fewer key heads than query heads. offload, pieces: enable_activation_offload of
    the model, and num_shards of its tiled_mlp, 1 without it.
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

    @property
    def unsharded(self) -> bool:
        """Gradients of earlier micro-batches are whole on every GPU. With one GPU that is no more than its shard."""
        return self.several and (self.no_sync or self.gpus == 1)


def parameters(shape: Shape, setting: Setting) -> float:
    """This rank's shard, in model_dtype."""
    return setting.kept * shape.parameters / setting.gpus


def moments(shape: Shape, setting: Setting) -> float:
    """AdamW's two, in model_dtype too; none for what is frozen."""
    return 2 * setting.kept * shape.parameters / setting.gpus if setting.trained else 0.0


def gradients(shape: Shape, setting: Setting, layers_left: float) -> float:
    """When ``layers_left`` decoder layers have not yet had their backward: each layer's arrive sharded, as its backward ends.

    With several micro-batches the sums of earlier ones are there from the first on: sharded, at least in float32, to which each
    layer's are added as they arrive; or unsharded in float32.
    """
    if not setting.trained:
        return 0.0
    if setting.unsharded:
        return float(FLOAT32 * shape.parameters)
    if setting.several:
        arriving = 0.0 if setting.kept >= FLOAT32 else setting.kept * (shape.layers - layers_left) * shape.layer_parameters
        return (max(setting.kept, FLOAT32) * shape.parameters + arriving) / setting.gpus
    return setting.kept * (shape.layers - layers_left) * shape.layer_parameters / setting.gpus


def gathered(shape: Shape, setting: Setting, layers: int) -> float:
    """Whole weights in the compute dtype: the root's, and of ``layers`` decoder layers (one at work, one on its way)."""
    return setting.compute * (shape.root_parameters + layers * shape.layer_parameters)


def head_gradient(shape: Shape, setting: Setting) -> float:
    """Of the language head, whole, in the compute dtype: it waits for the embedding's, at the end of the backward. With several
    micro-batches that are kept unsharded it is among theirs."""
    return setting.compute * shape.vocabulary * shape.hidden if setting.trained and not setting.unsharded else 0.0


def reducing(shape: Shape, setting: Setting) -> float:
    """A layer's gradients in float32 on their way to the ranks, kept until the next layer's follow."""
    return FLOAT32 * shape.layer_parameters if setting.trained else 0.0


def layer_inputs(shape: Shape, setting: Setting, layers: float) -> float:
    """Bytes a token: what recomputation keeps, the input of each of ``layers`` layers: layers * H; or on the host, but for
    one.
    """
    return setting.compute * shape.hidden * (min(layers, 1) if setting.offload else layers)


def rotary(shape: Shape, setting: Setting) -> float:
    """Bytes a token: cos and sin, which all layers share."""
    return 2 * setting.compute * shape.head_dim


def norms(shape: Shape, setting: Setting) -> float:
    """Bytes a token that a layer's two RMSNorms keep for their backward: input in float32, normalised input, output."""
    return 2 * shape.hidden * (FLOAT32 + 2 * setting.compute)


def attention_kept(shape: Shape, setting: Setting) -> float:
    """Bytes a token that attention keeps for its backward: q, k, v, its answer, and the log of each softmax's sum.

    Ulysses exchanges tokens for heads: as many numbers, but for key heads fewer than ranks.
    """
    repeated = max(1.0, setting.sp / shape.kv_heads)
    keys = shape.keys * repeated if setting.gqa else shape.queries
    return setting.compute * (2 * shape.queries + 2 * keys) + FLOAT32 * shape.heads


def norm_backward(shape: Shape, setting: Setting) -> float:
    """Bytes a token in the backward of the norm before the MLP, with the other one kept: its input in float32 and five more of
    that size, and the gradient that goes around it.
    """
    return shape.hidden * (6 * FLOAT32 + setting.compute) + norms(shape, setting) / 2


def mlp_backward(shape: Shape, setting: Setting) -> float:
    """Bytes a token at the MLP's fullest moment: gate, its activation, up, and the gradients of three such: 6 I, of a piece of
    the tokens; the gradient that comes in; and, in pieces, the whole that goes out.
    """
    states = 1 if setting.pieces == 1 else 2
    return setting.compute * (6 * shape.intermediate / setting.pieces + states * shape.hidden)


def mlp_gradients(shape: Shape, setting: Setting) -> float:
    """At that moment down's gradient is there, whole; in pieces, all three's sums in float32 too."""
    if not setting.trained:
        return 0.0
    sums = 0 if setting.pieces == 1 else 3 * FLOAT32
    return (sums + setting.compute) * shape.hidden * shape.intermediate


def head_chunk(shape: Shape, setting: Setting) -> float:
    """In the head's backward (workers/engine/logprob.py), logits of one chunk of positions, in the compute dtype and in float32,
    whose gradient takes their place."""
    return (FLOAT32 + setting.compute) * backward_chunk_size(shape.vocabulary, shape.hidden) * shape.vocabulary


def head_forward_chunk(shape: Shape, setting: Setting) -> float:
    """In its forward, those, and the exponentials whose sum is the log-probs' denominator."""
    return (2 * FLOAT32 + setting.compute) * chunk_size(shape.vocabulary) * shape.vocabulary


def head_backward(shape: Shape, setting: Setting) -> float:
    """Bytes a token while the head has its backward: the final norm's float32 input, normalised input and output, the states
    that the head reads, and their gradient."""
    return shape.hidden * (FLOAT32 + 4 * setting.compute)


def columns(shape: Shape, setting: Setting) -> float:
    """Bytes a token of the whole row, on every rank: token ids, masks, weights, log-probs old and new, advantages and
    gradients.
    """
    return 20 * 8.0


def layer_forward(shape: Shape, setting: Setting) -> float:
    """Bytes a token without gradient, the more of two: in the MLP activation, up and their product, and four states (embedding,
    layer's input, attention's sum, norm); in attention four times q's width, k, v, and three states."""
    mlp = 3 * shape.intermediate / setting.pieces + (4 if setting.pieces == 1 else 5) * shape.hidden
    return setting.compute * max(mlp, 4 * shape.queries + 2 * shape.keys + 3 * shape.hidden)


def resident(shape: Shape, setting: Setting) -> Parts:
    """What lies there from step to step."""
    return {
        "parameters": parameters(shape, setting),
        "moments": 0.0 if setting.optimizer_offload else moments(shape, setting),
    }


def in_layer(shape: Shape, setting: Setting, row: float, layers_left: int) -> Parts:
    """In the backward of a layer, when ``layers_left`` layers have their inputs kept, this one's among them: in its MLP, or,
    if that is more, in the norm before it. row: tokens, of which this rank has 1 / sp.
    """
    tokens = row / setting.sp
    attention = attention_kept(shape, setting) + rotary(shape, setting)
    whole = 3 * setting.compute * shape.hidden * shape.intermediate if setting.trained else 0.0
    in_mlp = (mlp_gradients(shape, setting), norms(shape, setting) + attention, mlp_backward(shape, setting))
    in_norm = (whole, norm_backward(shape, setting) + attention, 0.0)
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
    """In the language head: in its backward, where its own gradient is summed in float32 and then copied to the compute
    dtype; or in its forward, if that takes more.
    """
    tokens = row / setting.sp
    summed = (FLOAT32 + setting.compute) * shape.vocabulary * shape.hidden if setting.trained else 0.0
    chunk, forward = head_chunk(shape, setting), head_forward_chunk(shape, setting)
    if forward > chunk + summed:
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
    """At the backward's end, when the root's gradients cross in float32: nothing that grows with the row but its columns."""
    root = shape.root_parameters if setting.trained else 0
    crossing = root * (setting.compute + FLOAT32 + FLOAT32 / setting.gpus)
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
    """Parameters, gradients and moments, all of them sharded: fused AdamW works in place."""
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
    """Bytes by part at a train step's fullest moment. The layers' backward is fullest at one of its ends: inputs go while
    gradients come, both evenly."""
    moments = [
        in_head(shape, setting, row),
        in_layer(shape, setting, row, shape.layers),
        in_layer(shape, setting, row, 1),
        in_reduction(shape, setting, row),
        at_optimizer(shape, setting, row),
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def scoring(shape: Shape, setting: Setting, row: float) -> Parts:
    """Bytes by part while log-probs are computed without gradient: within a layer's MLP, or within the head."""
    tokens = row / setting.sp
    here = {**resident(shape, setting), "gathered": gathered(shape, setting, 2)}
    head = head_forward_chunk(shape, setting) + tokens * 3 * setting.compute * shape.hidden
    mlp = tokens * (layer_forward(shape, setting) + rotary(shape, setting))
    most = {"MLP": mlp, "head, columns": 0.0} if mlp > head else {"MLP": 0.0, "head, columns": head}
    return {**here, **most, "head, columns": most["head, columns"] + row * columns(shape, setting)}


def longest(phase: Callable[[Shape, Setting, float], Parts], shape: Shape, setting: Setting, usable: float) -> int:
    """The longest row, in tokens, for which ``phase`` (training, scoring) takes ``usable`` bytes at most; 0 if not one fits."""
    low, high = 0, 1 << 28
    while low < high:
        middle = (low + high + 1) // 2
        if sum(phase(shape, setting, middle).values()) <= usable:
            low = middle
        else:
            high = middle - 1
    return low
