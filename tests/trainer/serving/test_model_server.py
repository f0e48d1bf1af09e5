"""What a model server loads: models, adapters, checkpoints."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.model_serving import serve_config
from tests.runs import make_task, run_ppo
from trainer.serving.model_server import adapter_on_base, has_seeds, model_files, name_of


def test_a_run_directory_is_exported_while_it_is_served(tmp_path: Path) -> None:
    task, run_dir = make_task(tmp_path / "task"), tmp_path / "run"
    run_ppo(task, run_dir, "trainer.save_freq=1", "trainer.total_training_steps=1")
    for place in (run_dir, run_dir / "global_step_1"):
        config = serve_config(f"model={place}", f"trainer.default_local_dir={tmp_path}/served")
        with model_files(config) as found:
            files = Path(found.path)
            assert files.is_relative_to(tmp_path / "served") and (files / "tokenizer.json").exists()
            weights = load_file(files / "model.safetensors")
            base = load_file(task / "base" / "model.safetensors")
            assert weights.keys() == base.keys() and any((weights[name] != base[name]).any() for name in weights)
        assert not files.exists() and [*(tmp_path / "served").iterdir()] == []
        assert name_of(config.model) == place.name


def test_a_model_directory_or_hub_name_is_loaded_as_it_is() -> None:
    config = serve_config("model=Qwen/Qwen3-4B")
    with model_files(config) as found:
        assert found == config.actor_rollout_ref.model and found.path == "Qwen/Qwen3-4B"
    assert name_of("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_an_adapter_without_base_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2}))
    with pytest.raises(ValueError, match=r"names no base model \(base_model_name_or_path\)"):
        adapter_on_base(serve_config().actor_rollout_ref.model, tmp_path)


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (("rollout=embedded", "trainer.device=cuda"), True),
        (("rollout=vllm", "trainer.device=cuda"), True),
        (("rollout=sglang", "trainer.device=cpu"), True),
        (("rollout=sglang", "trainer.device=cuda"), False),
        (
            (
                "rollout=sglang",
                "trainer.device=cuda",
                "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=true",
            ),
            True,
        ),
    ],
)
def test_seeds_need_an_engine_that_samples_by_them(words: tuple[str, ...], seeds: bool) -> None:
    assert has_seeds(serve_config("model=Qwen/Qwen3-4B", *words)) is seeds
