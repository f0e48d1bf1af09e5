"""Sizes of a new task's recipe, on machines that are not here."""

import pytest

from trainer.new_task.create import defaults
from trainer.new_task.sizes import GB, LocalMachine, sizes

CPU, H100 = LocalMachine(), LocalMachine(8, 80 * GB, has_bfloat16=True)


def test_a_cpu_trains_a_tiny_model_in_float32_with_the_embedded_engine() -> None:
    values = sizes(CPU, defaults(), "own")
    assert (values["device"], values["gpus"], values["engine"], values["dtype"]) == ("cpu", 1, "embedded", "float32")
    assert values["model"] == "model/warm" and values["rate"] > 1e-5 and values["machine"] == "a CPU"


def test_gpus_train_a_pretrained_model_with_vllm() -> None:
    values = sizes(H100, defaults(), "own")
    assert (values["device"], values["gpus"], values["engine"], values["dtype"]) == ("cuda", 8, "vllm", "bfloat16")
    assert values["model"].startswith("Qwen/") and values["rate"] <= 1e-5 and values["machine"] == "8 GPUs of 80 GB"
    assert values["save_freq"] > 0 and values["test_freq"] > 0


@pytest.mark.parametrize(("memory", "size", "offload"), [(16, "0.5B", True), (24, "0.5B", False), (80, "1.5B", False)])
def test_the_model_fits_the_smallest_gpu(memory: float, size: str, offload: bool) -> None:
    values = sizes(LocalMachine(1, memory * GB, has_bfloat16=True), defaults(), "own")
    assert size in values["model"] and values["offload"] is offload and values["machine"] == f"1 GPU of {memory} GB"


def test_gpus_without_bfloat16_compute_in_float32() -> None:
    assert sizes(LocalMachine(1, 32 * GB), defaults(), "own")["dtype"] == "float32"


def test_a_template_has_sizes_of_its_own() -> None:
    assert sizes(CPU, defaults(), "gsm8k")["model"].startswith("Qwen/")
    assert sizes(CPU, defaults(), "tool")["response_length"] > sizes(CPU, defaults(), "own")["response_length"]
