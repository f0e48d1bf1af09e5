import pytest

from scripts.bench.suite import PARTS, ROOT, ask


@pytest.mark.soak
@pytest.mark.alone
def test_a_quick_run_tells_the_parts_of_a_start() -> None:
    part = PARTS["startup"]
    said = ask(part, part.quick, ROOT)
    check, first = said["check"], said["first_step"]
    parts = {name: seconds for name, seconds in first.items() if name not in ("total", "cpu")}
    assert list(parts) == [
        "python and the program", "config", "imports", "backend", "data", "workers", "model", "engine", "first sync",
        "validation", "first step",
    ]  # fmt: skip
    assert sum(parts.values()) == pytest.approx(first["total"], abs=1e-3) and min(parts.values()) >= 0
    assert 0 < check["cpu"] < 3 and check["total"] < first["total"] < 60
    assert check["cpu"] < first["cpu"], "torch is loaded for the run alone"
    assert [figure.of(said) for figure in part.figures.values()] == [check["total"], first["total"]]
