"""Time model: seconds of training passes, collectives and generation on one GPU. Arithmetic without a configuration.

Each cost is an amount of work over a rate of the machine (hardware.py): a roofline whose roofs are measured. A pass over tokens
costs the sum of its products, attention and elementwise kernels. On CUDA, Python and launches run ahead of the GPU, so the larger
of both counts, and collectives of FSDP overlap with compute; on the CPU everything shares a core and adds up.

Sources. FLOPs: 2 per parameter and token in a forward, twice that in the backward, one more forward of the layers if recomputed
(Narayanan et al., arXiv:2104.04473, eq. 3, with the exact widths of grouped-query attention). Attention: 4 per query-key pair and
width, 2.5 times that in the backward (FlashAttention-2, arXiv:2307.08691, section 4.1). Tensor parallel: two all-reduces of the
hidden states a layer in each direction (arXiv:1909.08053, section 3). Pipeline: idle share (p - 1) / (v m) (arXiv:2104.04473,
section 2.2). Ring collectives: (n - 1) / n of the bytes per GPU. Sizes in bytes, rates in bytes or FLOPs per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import groupby

from trainer.planner.hardware import Hardware
from trainer.planner.memory_model import Shape, unit_parameters

FLOAT32 = 4
Parts = dict[str, float]
"""Seconds by what takes them."""
HEAD_BYTES = 32
"""Traffic per logit of a forward: written and read in the compute dtype, cast, and read by maximum, exponential and sum."""
COMPILED_LAYER, COMPILED_HEAD, COMPILED_BATCH = 0.8, (4, 11), 1.4
"""With use_torch_compile: share of a layer's elementwise traffic that is left; traffic per logit of a forward, and with its
backward; and cost of the host for a micro-batch, which kernels hide, relative to hardware.SoftwareCosts.batch. From train.py with
0.5B and 7B on H100 and H200 (docs/performance.md, «An update on one GPU»): 0.6 to 1.0 of a layer's traffic; 30 ms of the host for
a forward and 59 with its backward, with FSDP's hooks; the head's from the kernels of a step of 0.5B there."""
ADAPTER_LAYER = 1.15e-4
"""Seconds of an adapter's kernels in a layer of a decode step on CUDA, two for each group of its matrices: the generation of
docs/gpu.md's lora-adapter less that of lora-merged (7B, 28 layers, 1,024 steps, H200)."""
ADAMW_NUMBERS = 7
"""Numbers per parameter that AdamW reads (4) and writes (3): parameter, gradient, two moments."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a pass on one GPU. products, attention: FLOPs. bytes: of elementwise kernels.

    launches: layers launched. batches: micro-batches, once for each time that the layers are passed.
    """

    products: float
    attention: float
    bytes: float
    launches: float
    batches: float

    def seconds(self, hardware: Hardware, size: int) -> Parts:
        """Seconds by part. size: bytes of a number in the products."""
        device = self.kernels(hardware, size)
        return device | self.host(hardware, sum(device.values()))

    def kernels(self, hardware: Hardware, size: int) -> Parts:
        peak = hardware.peak(size)
        return {
            "products": self.products / (peak * hardware.products),
            "attention": self.attention / (peak * hardware.attention),
            "elementwise": self.bytes / (hardware.bandwidth * hardware.streaming),
        }

    def host(
        self, hardware: Hardware, kernels: float, share: float = 1.0, *, wrapped: bool = True, compiled: bool = False
    ) -> Parts:
        """Seconds in which the GPU waits for Python. kernels: seconds of the GPU's own work; share: of the layers launched here.

        Launches of layers run ahead of the kernels. What surrounds the layers of a micro-batch does too if they are compiled: its
        tensors, embedding, head, loss and results, where FSDP's hooks or a pipeline are part of it (wrapped).
        """
        layers = share * self.launches * hardware.software.layer
        batches = self.batches * hardware.software.batch if wrapped else 0.0
        hidden = kernels if hardware.device == "cuda" else 0.0
        if compiled:
            return {"launches": max(0.0, layers + COMPILED_BATCH * batches - hidden), "batches": 0.0}
        return {"launches": max(0.0, layers - hidden), "batches": batches}


def pass_work(
    shape: Shape,
    tokens: float,
    pairs: float,
    size: int,
    *,
    micro_batches: int,
    head: bool,
    backward: bool = False,
    recompute: bool = False,
    frozen: bool = False,
    compiled: bool = False,
) -> Work:
    """Work of a pass over ``tokens`` on one GPU that holds the whole model.

    pairs: query-key pairs of causal attention, the sum of length^2 / 2 over rows. head: with the language head, whose logits are
    computed again in the backward (workers/engine/logprob.py). frozen: no gradients of weights, as under LoRA. compiled: layers
    and head are.
    """
    passes = 1 + (2 + recompute if backward else 0)
    layers = shape.layers * passes
    products = layers - shape.layers * (backward and frozen)
    attention = shape.layers * (1 + (2.5 + recompute if backward else 0))
    heads = ((3 if frozen else 4) if backward else 1) if head else 0
    # Two norms, two residual sums and the cast of their input; rotary embedding, q, k and v; gate, up and their product.
    width = shape.intermediate + shape.active * shape.expert_width
    elementwise: float = size * (16 * shape.hidden + 8 * (shape.queries + 2 * shape.keys) + 5 * width)
    # Hidden states are copied to the experts of each token, and their outputs are added up: two reads and two writes.
    elementwise += size * 4 * shape.active * shape.hidden
    logits = (COMPILED_HEAD[backward] if compiled else HEAD_BYTES * (2 if backward else 1)) * head
    elementwise *= COMPILED_LAYER if compiled else 1.0
    return Work(
        products=2.0 * tokens * (products * matrices(shape) + heads * shape.vocabulary * shape.hidden),
        attention=4.0 * pairs * attention * shape.queries,
        bytes=tokens * (layers * elementwise + logits * shape.vocabulary),
        launches=float(micro_batches * layers),
        batches=float(micro_batches * passes),
    )


def matrices(shape: Shape, experts: float | None = None) -> float:
    """Parameters of a layer's matrices, with as many of its routed experts: None, those of one token."""
    width = shape.intermediate + (shape.active if experts is None else experts) * shape.expert_width
    return 2 * shape.hidden * (shape.queries + shape.keys) + shape.hidden * (3 * width + shape.experts)


def experts_of(shape: Shape, tokens: float) -> float:
    """Experts of a layer that ``tokens`` tokens pass together, on average, if the router chooses evenly."""
    return shape.experts * (1 - (1 - shape.active / shape.experts) ** tokens) if shape.experts else 0.0


def optimizer(parameters: float, size: int, hardware: Hardware) -> float:
    """Seconds of AdamW on this many parameters of ``size`` bytes."""
    return ADAMW_NUMBERS * size * parameters / (hardware.bandwidth * hardware.streaming)


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator of ``ranks`` GPUs. crosses: it spans several nodes."""

    ranks: int
    crosses: bool
    hardware: Hardware

    def ring(self, size: float, calls: float = 1.0, rounds: int = 1) -> float:
        """Seconds of ``calls`` all-gathers, reduce-scatters or all-to-alls of ``size`` bytes each; rounds=2: all-reduces."""
        if self.ranks == 1:
            return 0.0
        rate = self.hardware.network if self.crosses else self.hardware.link
        return calls * rounds * (self.hardware.latency + size * (self.ranks - 1) / self.ranks / rate)


def fsdp(
    shape: Shape,
    shards: Communicator,
    copies: Communicator,
    size: int,
    compute: float,
    *,
    micro_batches: int,
    backward: bool,
    reshard: bool,
) -> Parts:
    """Seconds of FSDP's collectives that computation (``compute`` seconds) does not hide.

    Weights are gathered in the compute dtype, once more in the backward if freed in between; gradients are reduced in float32
    over the shards in every micro-batch, and once over the copies of HSDP.
    """
    gathers = micro_batches * (2 if backward and reshard else 1)
    layers, unit, root = shape.layers * shape.layer_parameters, unit_parameters(shape), shape.root_parameters
    whole = gathers * (shards.ring(size * unit, layers / unit) + shards.ring(size * root))
    if backward:
        whole += micro_batches * shards.ring(FLOAT32 * (layers + root), 1) + copies.ring(
            FLOAT32 * shape.parameters / shards.ranks, rounds=2
        )
    if shards.hardware.device == "cpu":
        return {"collectives": whole}
    # Nothing hides the gather of the root and the first unit, and in the backward the reduction of the root.
    first = gathers * shards.ring(size * (root + unit)) + micro_batches * backward * shards.ring(FLOAT32 * root)
    return {"collectives": max(first, whole - compute)}


def fsdp_copies(
    shape: Shape, shards: int, size: int, kept: int, hardware: Hardware, *, micro_batches: int, backward: bool, reshard: bool
) -> float:
    """Seconds of FSDP's own copies, which it makes on one GPU too.

    A shard's cast, gathered weights out of their buffer; in the backward the gradients' cast to float32 and their sum.
    kept: bytes of a parameter.
    """
    gathers = 2 if backward and reshard else 1
    each = gathers * (kept / shards + 3 * size) + backward * (size + FLOAT32 + 3 * FLOAT32 / shards)
    return micro_batches * shape.parameters * each / (hardware.bandwidth * hardware.streaming)


def tensor_parallel(shape: Shape, group: Communicator, tokens: float, size: int, *, micro_batches: int, passes: float) -> float:
    """Seconds of Megatron's all-reduces of hidden states; sequence parallel moves the same bytes (arXiv:2205.05198).

    passes: times that the layers are passed: 1 forward, 2 with the backward, 3 with recomputation.
    """
    calls = 2 * shape.layers * passes * micro_batches
    return group.ring(size * tokens * shape.hidden / micro_batches, calls, rounds=2)


def ulysses(shape: Shape, group: Communicator, tokens: float, size: int, *, micro_batches: int, passes: float) -> float:
    """Seconds of Ulysses' all-to-alls, of q, k, v and the output of each layer (arXiv:2309.14509). tokens: of this rank."""
    width = 2 * shape.queries + 2 * shape.keys
    return group.ring(size * tokens * width / 4 / micro_batches, 4 * shape.layers * passes * micro_batches)


def bubble(stages: int, chunks: int, micro_batches: int) -> float:
    """Idle time of a pipeline as a multiple of its work."""
    return (stages - 1) / (chunks * micro_batches)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A rollout engine on ``group``'s GPUs (tensor parallel).

    slots: sequences at once. call_steps: decode steps of a call, between which it waits; 0: it does not wait. eager: without CUDA
    graphs. adapter: the engine applies a LoRA adapter of all layers (lora_sync=adapter).
    """

    shape: Shape
    group: Communicator
    slots: int
    size: int
    call_steps: int
    eager: bool = False
    adapter: bool = False

    def step(self, running: float, context: float) -> float:
        """Seconds of a decode step of ``running`` sequences with ``context`` tokens each on average."""
        shape, hardware, costs = self.shape, self.group.hardware, self.group.hardware.software
        rate, ranks = hardware.bandwidth * hardware.reading, self.group.ranks
        head = shape.vocabulary * shape.hidden
        weights = shape.layers * matrices(shape) + head
        # Weights are read once for all sequences, keys and values by each.
        reading = self.size * (shape.layers * matrices(shape, experts_of(shape, running)) + head) / rate
        multiplying = 2 * weights * running / (hardware.peak(self.size) * hardware.products)
        cache = running * context * 2 * shape.keys * shape.layers * self.size / rate
        logits = HEAD_BYTES * shape.vocabulary * running / rate
        device = (max(reading, multiplying) + cache + logits) / ranks
        if ranks > 1:
            device += self.group.ring(self.size * running * shape.hidden, 2 * shape.layers, rounds=2)
        if self.adapter and hardware.device == "cuda":
            device += ADAPTER_LAYER * shape.layers
        host = costs.decode + costs.decode_row * running + (costs.decode_layer * shape.layers if self.eager else 0.0)
        return max(device, host) if hardware.device == "cuda" else device + host

    def prefill(self, tokens: float, length: float) -> float:
        """Seconds to compute ``tokens`` of prompts of ``length`` tokens each."""
        work = pass_work(self.shape, tokens, tokens * length / 2, self.size, micro_batches=0, head=False)
        return sum(work.seconds(self.group.hardware, self.size).values()) / self.group.ranks

    def generate(self, prompts: float, prompt: float, lengths: Sequence[int]) -> Parts:
        """Seconds until all responses of a replica have ended. lengths: tokens of each; they enter in this order."""
        decoding, now, admitted, began = 0.0, 0, 0, 0.0
        running: list[int] = []  # decode steps after which responses end
        while running or admitted < len(lengths):
            while admitted < len(lengths) and len(running) < self.slots:
                heappush(running, now + lengths[admitted])
                began, admitted = began + now, admitted + 1
            until = running[0]
            # Tokens that running responses have on average, halfway to the next end.
            context = prompt + (now + until) / 2 - began / len(running)
            decoding += (until - now) * self.step(len(running), context)
            while running and running[0] == until:
                heappop(running)
                began -= began / (len(running) + 1)
            now = until
        calls = math.ceil(now / self.call_steps) * self.group.hardware.software.turn if self.call_steps else 0.0
        return {"decode": decoding, "calls": calls, "prefill": self.prefill(prompts * prompt, prompt)}


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Mean and maximum tokens of prompts and responses. Responses are geometric, truncated at the maximum."""

    prompt: float
    response: float
    most: int

    def responses(self, count: int) -> tuple[int, ...]:
        """Lengths of ``count`` responses: evenly spaced quantiles, in a fixed irregular order."""
        return _quantiles(self.response, self.most, count)

    def longest(self, count: int) -> int:
        """Longest of ``count`` responses, its median."""
        if self.response >= self.most:
            return self.most
        return min(
            self.most, math.ceil(-exponential_scale(self.response, self.most) * math.log(-math.expm1(-math.log(2) / count)))
        )


@cache
def _quantiles(mean: float, most: int, count: int) -> tuple[int, ...]:
    if mean >= most:
        return (most,) * count

    def of(scale: float) -> list[int]:
        return [min(most, max(1, math.ceil(-scale * math.log1p(-(i + 0.5) / count)))) for i in range(count)]

    found = of(_scale(lambda scale: sum(of(scale)) / count, mean, most))
    # Steps of a golden ratio: long and short responses alternate.
    return tuple(found[i] for i in sorted(range(count), key=lambda i: (i * 0.6180339887) % 1))


@cache
def exponential_scale(mean: float, most: float) -> float:
    """Scale of an exponential distribution that has this mean when it is truncated at ``most``, rounded up to whole tokens."""

    # A whole number of tokens x has the probability exp(-(x - 1) / scale) of being reached: a geometric series.
    def of(scale: float) -> float:
        return math.expm1(-most / scale) / math.expm1(-1 / scale)

    return _scale(of, mean, most)


def _scale(mean_of: Callable[[float], float], mean: float, most: float) -> float:
    """Scale at which a truncated distribution has this mean, by bisection: the mean grows with the scale."""
    low, high = 1e-9, 1e3 * most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    return high


@cache
def pairs_of(lengths: tuple[int, ...], prompt: float) -> float:
    """Mean query-key pairs of a row with a prompt and one of these responses."""
    return sum(len([*same]) * (prompt + length) ** 2 / 2 for length, same in groupby(sorted(lengths))) / len(lengths)
