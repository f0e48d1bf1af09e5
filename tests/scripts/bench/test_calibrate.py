"""The file of a calibration: what was measured replaces the base's values, and says so."""

from pathlib import Path

import pytest
import yaml

from scripts.bench import calibrate
from trainer.planner.hardware import FOLDER, load_hardware


def test_file_has_measured_values_and_the_rest_of_the_base(tmp_path: Path) -> None:
    base = yaml.safe_load((FOLDER / "cpu.yaml").read_text())
    own = tmp_path / "own.yaml"
    own.write_text(calibrate.as_yaml(base, {"bandwidth": 3e9, "layer": 0.25}, "cpu"))
    found, shipped = load_hardware(str(own)), load_hardware("cpu")
    assert found.bandwidth == 3e9 and found.software.layer == 0.25
    assert found.network == shipped.network and found.software.sleep == shipped.software.sleep
    sources = yaml.safe_load(own.read_text())
    assert sources["layer"]["source"].startswith("measured by scripts/bench/calibrate.py")
    assert sources["network"]["source"] == base["network"]["source"]


def test_base_of_another_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calibrate.main(["--base", "h200", "--output", str(tmp_path / "own.yaml")])
    assert "--base h200: is of device cuda; name one of cpu" in capsys.readouterr().err


@pytest.mark.soak
def test_this_machine_is_measured(tmp_path: Path) -> None:
    calibrate.main(["--output", str(tmp_path / "own.yaml")])
    found = load_hardware(str(tmp_path / "own.yaml"))
    assert 1e9 < found.float32 < 1e13 and 0.5 < found.products < 1.5 and 0 < found.reading < 5
    assert 0 < found.software.layer < 0.1 and 0 < found.software.decode_layer < 0.1
