"""What is freed stays with the process, until it is given back."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from workers.rollout.memory import give_back_free_memory, keep_freed_memory
KEEP

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
give_back_free_memory()
print(faults())
"""


def faults(keep: str) -> list[int]:
    """Pages that come anew for ten times 8 MB, one after the other; and once what was free has been given back."""
    ran = subprocess.run([sys.executable, "-c", CODE.replace("KEEP", keep)], capture_output=True, text=True, check=True)
    return [int(line) for line in ran.stdout.split()]


def test_it_leaves_the_environments_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    again, _ = faults("keep_freed_memory()")
    assert again > 10_000


def test_what_is_freed_is_used_again_and_given_back_when_asked() -> None:
    page, size = 4096, 8_000_000
    again, after = faults("keep_freed_memory()")
    assert again < 100
    assert after > 0.9 * size / page
