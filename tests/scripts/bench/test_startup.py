import pytest

from scripts.bench.suite import PARTS, ROOT, ask


@pytest.mark.soak
@pytest.mark.alone
def test_a_quick_run_tells_the_parts_of_a_start() -> None:
    part = PARTS["startup"]
    said = ask(part, part.quick, ROOT)
    check, first = said["check"], said["first_step"]
    whole, rest = first["total"], [first[name] for name in ("first generation", "step", "validation and end")]
    parts = [
        name
        for name in first
        if name not in ("total", "first generation", "step", "validation and end", "cpu") and "/" not in name
    ]
    assert parts == ["program", "checks", "backend", "data", "workers", "models", "engine", "rewards", "sync"]
    assert sum(rest) == pytest.approx(whole, abs=1e-3) and min(first.values()) >= 0
    assert sum(first[name] for name in parts) == pytest.approx(first["first generation"], abs=1e-3)
    assert {"ranks/actor", "ranks/actor/read", "ranks/rollout"} <= first.keys()
    assert 0 < check["cpu"] < 3 and check["total"] < first["total"] < 60
    assert check["cpu"] < first["cpu"], "torch is loaded for the run alone"
    assert [figure.of(said) for figure in part.figures.values()] == [check["total"], first["total"]]
