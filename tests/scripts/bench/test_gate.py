import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench.gate import gate, is_slower, keep
from scripts.bench.suite import Figure, Part

# The bench's figures are computed, not timed: the noise of a shared machine does not affect these tests.
BENCH = """
import json, os, pathlib
from work import COST
calls = pathlib.Path(os.environ["CALLS"])
n = len(calls.read_text()) if calls.exists() else 0
calls.write_text("." * (n + 1))
noise = (1.0, 1.06, 0.97, 1.02, 1.09, 0.95, 1.04)[n % 7]
print(json.dumps({"seconds": COST * noise, "speed": 1 / (COST * noise)}))
"""
PARTS = {
    "toy": Part("toy", (), (), 30, {
        "seconds": Figure(lambda report: report["seconds"]),
        "speed": Figure(lambda report: report["speed"], better="higher"),
    })
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Repository with the revisions ``same`` (without the bench), ``equal`` (as fast), ``slow`` (1.3 x) and ``fast``."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    home = tmp_path / "repository"
    (home / "scripts" / "bench").mkdir(parents=True)
    git = ["git", "-C", str(home), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for name, cost in (("same", 1.0), ("equal", 1.0), ("slow", 1.3), ("fast", 0.7)):
        (home / "work.py").write_text(f"COST = {cost}  # {name}\n")
        if name != "same":
            (home / "scripts" / "bench" / "toy.py").write_text(BENCH)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", name], check=True)
        subprocess.run([*git, "tag", name], check=True)
    return home


@pytest.mark.parametrize(("head", "blamed"), [("slow", ["seconds", "speed"]), ("equal", []), ("fast", [])])
def test_only_slower_figures_are_reported(
    repository: Path, head: str, blamed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found, problems = gate(repository, "same", head, PARTS, rounds=5, tolerance=0.02)
    assert [problem.partition(":")[0] for problem in problems] == [f"toy, {title}" for title in blamed]
    assert all(1.2 < float(problem.split()[2]) < 1.4 for problem in problems)
    assert json.loads(capsys.readouterr().out)["ratios"] == found
    ratios = found["toy"]
    assert [len(of) for of in ratios.values()] == ([10, 10] if blamed else [5, 5]), "a suspect is measured again"
    left = subprocess.run(["git", "-C", str(repository), "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(left.splitlines()) == 1


def test_small_changes_add_up_over_a_chain_of_runs(repository: Path, tmp_path: Path) -> None:
    history = tmp_path / "gate.jsonl"

    def kept(base: str, head: str, seconds: list[float]) -> list[str]:
        return keep(history, repository, base, head, {"toy": {"seconds": seconds}})

    assert kept("same", "equal", [1.01, 1.0, 1.02]) == []
    assert kept("same", "slow", [3.0]) == [], "not of the chain"
    first = subprocess.run(["git", "-C", str(repository), "rev-parse", "same"], check=True, capture_output=True, text=True).stdout
    assert kept("equal", "fast", [1.02]) == [f"toy, seconds: {1.01 * 1.02:.3f} x since {first[:8]}, the product of 2 runs"]
    runs = [json.loads(line) for line in history.read_text().splitlines()]
    assert [run["medians"]["toy"]["seconds"] for run in runs] == [1.01, 3.0, 1.02] and runs[0]["base"] == first.strip()
    with pytest.raises(subprocess.CalledProcessError):
        kept("unknown", "fast", [1.0])


def test_a_failed_bench_is_named_with_its_revision(repository: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^gone at BASE: exit code 1: .*No module named scripts.bench.gone"):
        gate(repository, "same", "equal", {"gone": Part("gone", (), (), 30, {})}, rounds=5, tolerance=0.02)


def test_is_slower_needs_a_significant_slowdown_above_the_tolerance() -> None:
    assert is_slower([1.05, 1.04, 1.03, 1.06, 1.2], 0.02)
    assert not is_slower([1.05, 1.04, 0.99, 1.06, 1.2], 0.02), "4 of 5 ratios above 1 are not significant"
    assert is_slower([1.05, 1.04, 0.9, 1.06, 1.2, 1.1, 1.1, 1.1], 0.02), "7 of 8 are"
    assert not is_slower([1.01] * 5, 0.02), "below the tolerance"


def test_false_positive_rate_of_five_rounds_is_one_in_32() -> None:
    """One of the 32 possible combinations of signs counts as slower."""
    outcomes = [[1.1 if bits >> i & 1 else 0.9 for i in range(5)] for bits in range(32)]
    assert sum(is_slower(outcome, 0.02) for outcome in outcomes) == 1
