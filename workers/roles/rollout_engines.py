"""Rollout engines, by name."""

from importlib.util import find_spec
from typing import Literal

from configs.base.keys import ConfigError
from workers.controller.group import WorkerInfo
from workers.engine.hf.hf_model import DTYPES, empty_model, model_config
from workers.rollout.base import Rollout, RolloutSpec

ENGINES = ("embedded", "vllm", "sglang")


def check_installed(engine: str) -> None:
    """Check that the package of the engine is installed. Raises ValueError with the command to run if it is not."""
    title = {"vllm": "vLLM", "sglang": "SGLang"}.get(engine)
    if title is not None and find_spec(engine) is None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={engine}: {title} is not installed here; "
            f"run scripts/install_engine.sh {engine} cpu, or on a machine with a GPU scripts/install_engine.sh {engine} cuda"
        )


def import_engine(engine: str, device: Literal["cpu", "cuda"]) -> None:
    """Import in advance what make_rollout needs: ten seconds for vLLM. SGLang is imported by its own processes."""
    check_installed(engine)
    if engine == "vllm":
        from workers.rollout.vllm.vllm_engine import import_vllm

        import_vllm(device)


def check_supported(spec: RolloutSpec) -> None:
    """Check, without weights, what an engine refuses when it starts. Raises ConfigError."""
    if spec.rollout.name == "vllm" and spec.device == "cpu":
        import_engine("vllm", "cpu")
        from workers.rollout.vllm import vllm_cpu

        model = empty_model(spec.model, model_config(spec.model, "lm"), "lm", DTYPES[spec.rollout.dtype])
        vllm_cpu.cache_bytes(spec, model.hf)


def make_rollout(spec: RolloutSpec, place: WorkerInfo) -> Rollout:
    """The engine ``spec.rollout.name`` on this rank. Raises ValueError if the name is unknown or it is not installed."""
    check_installed(spec.rollout.name)
    # Imported by branch: on CUDA vLLM and SGLang need versions that exclude each other, so at most one of them is installed.
    match spec.rollout.name:
        case "embedded":
            from workers.rollout.embedded.embedded_engine import EmbeddedRollout

            return EmbeddedRollout(spec)
        case "vllm":
            from workers.rollout.vllm.vllm_engine import VLLMRollout

            return VLLMRollout(spec, place)
        case "sglang":
            from workers.rollout.sglang.sglang_engine import SGLangRollout

            return SGLangRollout(spec, place)
    raise ConfigError(f"actor_rollout_ref.rollout.name={spec.rollout.name}: no such engine; known: {', '.join(ENGINES)}")
