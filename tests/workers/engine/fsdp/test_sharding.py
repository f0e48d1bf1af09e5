"""When layers are compiled, and which of them FSDP gathers together."""

import sysconfig
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.tiny import fsdp_config, save_tiny_model
from tests.workers.engine.fsdp.conftest import Found
from tests.workers.engine.toy import distance, toy_engine
from workers.engine.fsdp import units
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import compiles


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH, and Python's headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    return tmp_path


def install(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_layers_are_compiled_on_a_gpu_unless_stated(machine: Path, capfd: pytest.CaptureFixture[str], compiler: str) -> None:
    install(machine, compiler)
    default = fsdp_config(use_torch_compile=None)
    assert compiles(default, "cuda") and not compiles(default, "cpu")
    for stated in (True, False):
        assert compiles(fsdp_config(use_torch_compile=stated), "cpu") == stated
        assert compiles(fsdp_config(use_torch_compile=stated), "cuda") == stated
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("installed", "cc", "missing"),
    [
        ([], None, "no C compiler; install gcc"),
        (["cc"], None, "no C compiler; install gcc"),  # Triton does not look for it
        (["gcc"], "icc", "no C compiler CC=icc"),  # nor for another one if CC is set
        (["gcc"], None, "no Python.h in "),
    ],
)
def test_layers_are_not_compiled_where_triton_cannot_build(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    installed: list[str],
    cc: str | None,
    missing: str,
) -> None:
    for name in installed:
        install(machine, name)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    if "Python.h" in missing:
        (machine / "Python.h").unlink()
    assert not compiles(fsdp_config(use_torch_compile=None), "cuda")
    assert capfd.readouterr().err.startswith(f"note: layers are not compiled: {missing}")


def units_of(engine: FSDPEngine) -> list[int]:
    """Layers of each unit, by the order of the layers."""
    sizes: dict[int, int] = {}
    for layer in engine._model.hf.base_model.layers:
        assert isinstance(layer, FSDPModule)
        state = id(layer._get_fsdp_state())
        sizes[state] = sizes.get(state, 0) + 1
    return list(sizes.values())


@pytest.mark.parametrize(("layers", "expected"), [(0.5, [1] * 5), (1.9, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_small_layers_share_a_unit(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: float, expected: list[int]
) -> None:
    path = save_tiny_model(tmp_path / "model", num_hidden_layers=5)
    plain = toy_engine(path)  # not wrapped
    parameters = sum(param.numel() for param in plain._model.layers[0].parameters())
    monkeypatch.setattr(units, "UNIT_PARAMETERS", int(layers * parameters))
    assert units_of(toy_engine(path, dtype="bfloat16", model_dtype="float32")) == expected


def test_the_largest_layer_sets_the_size_of_a_unit(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of this mixture is dense, and smaller than the others."""
    path = save_tiny_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0])
    dense, sparse, *_ = (sum(param.numel() for param in layer.parameters()) for layer in toy_engine(path)._model.layers)
    assert 2 * dense < sparse
    monkeypatch.setattr(units, "UNIT_PARAMETERS", sparse)
    assert units_of(toy_engine(path, dtype="bfloat16", model_dtype="float32")) == [1] * 4


@pytest.mark.parametrize("changes", ["plain", "recomputed", "gathered"])
def test_gradients_do_not_depend_on_units(two_ranks: tuple[Path, list[Found]], changes: str) -> None:
    found = two_ranks[1][0]["grouped"]
    assert all(distance(found[f"{changes} {layers}"], found[f"{changes} 1"]) < 1e-12 for layers in (2, 5))
