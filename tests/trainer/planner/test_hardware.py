"""Hardware files: complete, with a source for every number."""

from pathlib import Path

import pytest
import yaml

from trainer.planner.hardware import FOLDER, GpuCluster, load_hardware


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_number_has_a_unit_and_a_source(file: Path) -> None:
    hardware = load_hardware(file.stem)
    assert hardware.device == ("cpu" if file.stem == "cpu" else "cuda")
    for key, rate in yaml.safe_load(file.read_text()).items():
        assert key == "device" or (rate.keys() == {"value", "unit", "source"} and rate["source"]), key
    assert hardware.peak(2) == hardware.bfloat16 and hardware.peak(4) == hardware.float32


def test_cluster_is_nodes_gpus_and_hardware(tmp_path: Path) -> None:
    cluster = GpuCluster.of("2x8xH100")
    assert (cluster.nodes, cluster.gpus, cluster.hardware.name) == (2, 8, "h100")
    own = tmp_path / "own.yaml"
    own.write_text((FOLDER / "a100.yaml").read_text())
    assert GpuCluster.of(f"1x2x{own}").hardware.bandwidth == load_hardware("a100").bandwidth


@pytest.mark.parametrize(
    ("words", "message"),
    [("8xH100", "cluster=8xH100: must be nodes x GPUs"), ("0x8xH100", "must be nodes"), ("1x8xH101", "did you mean h100")],
)
def test_unknown_clusters_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuCluster.of(words)


def test_incomplete_file_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("".join(line for line in (FOLDER / "h100.yaml").open() if not line.startswith("link")))
    with pytest.raises(ValueError, match="missing or unknown: link"):
        load_hardware(str(own))
