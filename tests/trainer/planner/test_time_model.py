"""Time model: hand-computed sizes, and which way each of its terms goes."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from scripts.bench.shapes import SHAPES
from trainer.planner.hardware import load_hardware
from trainer.planner.memory_model import Shape
from trainer.planner.time_model import (
    ADAPTER_LAYER,
    COMPILED_BATCH,
    Communicator,
    Decoder,
    ResponseLengths,
    bubble,
    experts_of,
    fsdp,
    matrices,
    optimizer,
    pairs_of,
    pass_work,
    tensor_parallel,
    ulysses,
)

H200 = load_hardware("H200")
CPU = load_hardware("cpu")
SHAPE = Shape.of(SHAPES["7b"])
HEAD = SHAPE.vocabulary * SHAPE.hidden


def test_products_are_two_flops_per_parameter_and_token() -> None:
    forward = pass_work(SHAPE, 1000, 0, 2, micro_batches=1, head=True)
    dense = SHAPE.parameters - HEAD  # without the embedding, which is not multiplied
    assert forward.products == pytest.approx(2 * 1000 * dense, rel=1e-3)
    backward = pass_work(SHAPE, 1000, 0, 2, micro_batches=1, head=True, backward=True)
    layers = 2000 * SHAPE.layers * matrices(SHAPE)
    assert backward.products == 3 * layers + 4 * 2000 * HEAD, "logits are computed again"
    recomputed = pass_work(SHAPE, 1000, 0, 2, micro_batches=1, head=True, backward=True, recompute=True)
    assert recomputed.products - backward.products == layers
    frozen = pass_work(SHAPE, 1000, 0, 2, micro_batches=1, head=True, backward=True, frozen=True)
    assert backward.products - frozen.products == layers + 2000 * HEAD


def test_attention_is_four_flops_per_pair_and_width() -> None:
    assert pass_work(SHAPE, 0, 50, 2, micro_batches=1, head=True).attention == 4 * 50 * SHAPE.layers * SHAPE.queries
    assert pairs_of((10, 10, 30), 10) == (2 * 200 + 800) / 3


def test_launches_are_hidden_by_kernels_on_a_gpu_and_add_up_on_a_cpu() -> None:
    few = pass_work(SHAPE, 16, 0, 2, micro_batches=1, head=True)
    many = pass_work(SHAPE, 1e5, 0, 2, micro_batches=1, head=True)
    for work in (few, many):
        parts = work.seconds(H200, 2)
        device = parts["products"] + parts["attention"] + parts["elementwise"]
        # What surrounds the layers is not hidden.
        assert sum(parts.values()) == pytest.approx(max(device, SHAPE.layers * H200.software.layer) + H200.software.batch)
    assert many.seconds(CPU, 4)["launches"] == SHAPE.layers * CPU.software.layer


def test_compiled_layers_move_fewer_bytes_and_hide_what_surrounds_them() -> None:
    plain, compiled = (
        pass_work(SHAPE, 1e5, 0, 2, micro_batches=1, head=True, backward=True, compiled=compiled) for compiled in (False, True)
    )
    assert compiled.bytes < 0.8 * plain.bytes and compiled.products == plain.products
    kernels = sum(compiled.kernels(H200, 2).values())
    assert sum(compiled.host(H200, kernels, compiled=True).values()) == 0.0
    host = sum(compiled.host(H200, 0.0, compiled=True).values())
    assert host == pytest.approx(
        compiled.launches * H200.software.layer + COMPILED_BATCH * compiled.batches * H200.software.batch
    )
    # Without FSDP's hooks launches alone are left.
    alone = compiled.host(H200, 0.0, compiled=True, wrapped=False)
    assert sum(alone.values()) == compiled.launches * H200.software.layer
    assert plain.host(H200, kernels)["batches"] > 0.0 == plain.host(H200, kernels, wrapped=False)["batches"]


def test_collectives_take_the_ring_share_of_the_bytes_over_the_link() -> None:
    group = Communicator(4, False, replace(H200, latency=0.0))
    assert group.ring(8e9) == pytest.approx(8e9 * 3 / 4 / H200.link)
    assert group.ring(8e9, rounds=2) == pytest.approx(2 * group.ring(8e9))
    assert replace(group, crosses=True).ring(8e9) == pytest.approx(group.ring(8e9) * H200.link / H200.network)
    assert Communicator(1, False, H200).ring(8e9) == 0.0
    assert replace(group, hardware=H200).ring(0.0, calls=3) == pytest.approx(3 * H200.latency)


def test_compute_hides_fsdp_collectives_except_the_first_gather() -> None:
    group, one = Communicator(8, False, H200), Communicator(1, False, H200)

    def exposed(compute: float, **more: bool) -> float:
        settings = {"micro_batches": 2, "backward": True, "reshard": True} | more
        return fsdp(SHAPE, group, one, 2, compute, **settings)["collectives"]

    assert 0 < exposed(10.0) < exposed(0.1) < exposed(0.0)
    assert exposed(0.0, reshard=False) < exposed(0.0), "weights are gathered once"
    assert exposed(0.0, backward=False) < exposed(0.0, reshard=False), "no gradients"
    copies = fsdp(SHAPE, group, Communicator(2, True, H200), 2, 0.0, micro_batches=2, backward=True, reshard=True)["collectives"]
    assert copies - exposed(0.0) == pytest.approx(Communicator(2, True, H200).ring(4 * SHAPE.parameters / 8, rounds=2))
    assert fsdp(SHAPE, one, one, 2, 0.0, micro_batches=2, backward=True, reshard=True)["collectives"] == 0.0


def test_small_layers_are_gathered_together() -> None:
    """Bytes are the same, latencies fewer: 24 layers of 15M parameters have four units."""
    shape, group = Shape.of(SHAPES["0.5b"]), Communicator(8, False, replace(CPU, link=1e10, latency=1.0))
    gathers = fsdp(shape, group, group, 2, 0.0, micro_batches=1, backward=False, reshard=True)["collectives"]
    units, root = shape.layers * shape.layer_parameters, shape.root_parameters
    assert gathers == pytest.approx(shape.layers / 6 + 1 + 2 * (units + root) * 7 / 8 / 1e10)


def test_tensor_parallel_reduces_hidden_states_twice_a_layer() -> None:
    group = Communicator(2, False, replace(H200, latency=0.0))
    found = tensor_parallel(SHAPE, group, 4096, 2, micro_batches=4, passes=1)
    assert found == pytest.approx(2 * SHAPE.layers * 2 * (2 * 4096 * SHAPE.hidden) / 2 / H200.link)
    exchanged = ulysses(SHAPE, group, 4096, 2, micro_batches=4, passes=1)
    assert exchanged == pytest.approx(SHAPE.layers * 2 * 4096 * 2 * (SHAPE.queries + SHAPE.keys) / 2 / H200.link)
    with_latency = ulysses(SHAPE, replace(group, hardware=H200), 4096, 2, micro_batches=4, passes=1)
    assert with_latency - exchanged == pytest.approx(4 * 4 * SHAPE.layers * H200.latency)


def test_pipeline_idles_less_with_more_micro_batches_and_chunks() -> None:
    assert bubble(1, 1, 8) == 0.0
    assert bubble(4, 1, 8) == 3 / 8
    assert bubble(4, 2, 8) == 3 / 16


def test_adamw_reads_four_and_writes_three_numbers() -> None:
    assert optimizer(1e9, 4, H200) == pytest.approx(28e9 / (H200.bandwidth * H200.streaming))


def test_decode_step_reads_weights_once_and_each_cache() -> None:
    decoder = Decoder(SHAPE, Communicator(1, False, H200), slots=256, size=2, call_steps=32)
    weights = 2 * (SHAPE.layers * matrices(SHAPE) + HEAD) / (H200.bandwidth * H200.reading)
    assert decoder.step(1, 0) == pytest.approx(max(weights, H200.software.decode), rel=0.01)
    cache = 256 * 1000 * 2 * SHAPE.keys * SHAPE.layers * 2 / (H200.bandwidth * H200.reading)
    assert decoder.step(256, 3000) - decoder.step(256, 2000) == pytest.approx(cache)
    assert replace(decoder, eager=True).step(1, 0) > decoder.step(1, 0)
    applying = replace(decoder, adapter=True)
    assert applying.step(256, 3000) - decoder.step(256, 3000) == pytest.approx(ADAPTER_LAYER * SHAPE.layers)
    half = replace(decoder, group=Communicator(2, False, replace(H200, latency=0.0)))
    assert half.step(64, 8000) < decoder.step(64, 8000)


def test_generation_ends_with_the_longest_response_and_waits_for_slots() -> None:
    decoder = Decoder(SHAPE, Communicator(1, False, H200), slots=2, size=2, call_steps=32)
    one = decoder.generate(1, 10, [100])["decode"]
    assert one == pytest.approx(100 * decoder.step(1, 60), rel=0.02)
    assert decoder.generate(1, 10, [100, 100, 100, 100])["decode"] == pytest.approx(200 * decoder.step(2, 60), rel=0.02)
    assert decoder.generate(1, 10, [100, 50])["decode"] == pytest.approx(
        50 * decoder.step(2, 35) + 50 * decoder.step(1, 85), rel=0.02
    )


def test_responses_have_the_given_mean_and_maximum() -> None:
    drawn = ResponseLengths(100, 300, 1000).responses(512)
    assert max(drawn) == 1000 and sum(drawn) / 512 == pytest.approx(300, rel=0.01)
    assert ResponseLengths(100, 300, 300).responses(4) == (300,) * 4
    first = sum(drawn[:256])
    assert first == pytest.approx(sum(drawn) / 2, rel=0.05), "long and short ones alternate"


def test_experts_multiply_by_those_of_a_token_and_are_read_by_those_of_all() -> None:
    # Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them active.
    shape = Shape.of({
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 0, "vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    })  # fmt: skip
    assert shape.parameters == pytest.approx(30.5e9, rel=0.005)
    assert shape.layers * matrices(shape) + 2 * shape.vocabulary * shape.hidden == pytest.approx(3.35e9, rel=0.01)
    assert experts_of(shape, 1) == pytest.approx(8) and experts_of(shape, 1e4) == pytest.approx(128)
    # Brute force over the choices of three tokens, of a smaller router.
    small = replace(shape, experts=4, active=2)
    pairs = [*combinations(range(4), 2)]
    seen = [len({*a, *b, *c}) for a, b, c in product(pairs, repeat=3)]
    assert experts_of(small, 3) == pytest.approx(sum(seen) / len(seen))
    hardware = load_hardware("h200")
    one, many = (Decoder(shape, Communicator(1, False, hardware), 512, 2, 32).step(n, 100) for n in (1, 512))
    dense = replace(shape, experts=0, active=0, intermediate=8 * 768)
    assert one == pytest.approx(Decoder(dense, Communicator(1, False, hardware), 512, 2, 32).step(1, 100), rel=0.01)
    assert many > 2 * Decoder(dense, Communicator(1, False, hardware), 512, 2, 32).step(512, 100)
