"""main_parity: short keys, errors and notes."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.parity import ParityConfig
from configs.validation.programs import check_parity

ROLLOUT = "actor_rollout_ref.rollout"


def parity_lines(*overrides: str) -> list[str]:
    """Errors, or the notes if there are none."""
    config = compose("parity", ParityConfig, overrides)
    try:
        return check_parity(config, {override.partition("=")[0] for override in overrides})
    except ConfigError as error:
        return str(error).splitlines()


def test_short_keys_set_model_and_engines() -> None:
    config = compose("parity", ParityConfig, ["model='~/other'", "engines=vllm"])
    assert config.engines == ["vllm"] and config.actor_rollout_ref.model.path == config.model and "~" not in config.model
    assert compose("parity", ParityConfig, ["actor_rollout_ref.model.path=m"]).actor_rollout_ref.model.path == "m"
    assert compose("parity", ParityConfig).actor_rollout_ref.rollout_of("vllm").name == "vllm"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (["engines=[embedded,vllm]"], []),
        (["engines=[]"], ["engines=[]: must list at least one engine, and none twice"]),
        (["engines=[vllm,vllm]"], ["engines=[vllm,vllm]: must list at least one engine, and none twice"]),
        ([f"{ROLLOUT}.name=vllm"], [f"{ROLLOUT}.name=vllm: the engines are selected by engines=[vllm]; remove the key"]),
        (
            ["model=a", "actor_rollout_ref.model.path=b"],
            ["model and actor_rollout_ref.model.path are the same key: set only one of them"],
        ),
        (
            ["trainer.backend=local"],
            [
                "trainer.backend=local: runs a single worker in this process, not 8 workers "
                "(trainer.nnodes * trainer.n_gpus_per_node = 1 * 8); use one worker, or trainer.backend=ray"
            ],
        ),
        (
            [f"{ROLLOUT}.max_model_len=8"],
            [
                f"{ROLLOUT}.max_model_len=8: less than data.max_prompt_length + data.max_response_length = 512 + 512 = 1024; "
                "increase it, or use null"
            ],
        ),
        (
            ["engines=[embedded,vllm]", "trainer.n_gpus_per_node=3"],
            [
                f"{ROLLOUT}.tensor_model_parallel_size=2: does not divide 3 workers "
                "(trainer.nnodes * trainer.n_gpus_per_node = 1 * 3) (3 = 1 * 2 + 1); use a divisor"
            ],
        ),
        (
            [f"{ROLLOUT}.enforce_eager=true"],
            [f"{ROLLOUT}.enforce_eager has no effect: the embedded engine does not capture graphs"],
        ),
        (["engines=[embedded,vllm]", f"{ROLLOUT}.enforce_eager=true"], []),
        (
            [f"{ROLLOUT}.temperature=1.0"],
            [f"{ROLLOUT}.temperature=1: an engine that ignores the temperature is not detected; use for example 0.8"],
        ),
        ([f"{ROLLOUT}.temperature=1.0", f"{ROLLOUT}.do_sample=false"], []),
        ([f"{ROLLOUT}.top_p=0.9"], [f"bounds.draw_z has no effect: {ROLLOUT}.top_k or top_p truncate the distribution"]),
        ([f"{ROLLOUT}.top_k=9"], [f"bounds.draw_z has no effect: {ROLLOUT}.top_k or top_p truncate the distribution"]),
    ],
)
def test_keys_of_parity_give_these_errors_and_notes(overrides: list[str], lines: list[str]) -> None:
    assert parity_lines(*overrides) == lines


def test_an_unknown_engine_gets_the_nearest() -> None:
    (line,) = parity_lines("engines=[embeded]")
    assert line.startswith("engines: embeded: unknown engine; known: embedded, ") and line.endswith("; did you mean embedded?")


def test_a_misspelt_key_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"bounds.log_prop_max.float32: there is no such key; did you mean bounds.log_prob_max"):
        compose("parity", ParityConfig, ["bounds.log_prop_max.float32=1"])
