"""What is freed stays with the process, until it is given back."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from workers.rollout.malloc_trim import trim_free_memory, keep_freed_memory
KEEP

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(SIZE // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
trim_free_memory()
print(faults())
"""


def faults(keep: str, size: int) -> list[int]:
    """Pages that come anew for ten tensors of ``size`` bytes, one after the other; and once what was free has been given back."""
    code = CODE.replace("KEEP", keep).replace("SIZE", str(size))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(line) for line in ran.stdout.split()]


def test_it_leaves_the_environments_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    again, _ = faults("keep_freed_memory()", 8_000_000)
    assert again > 10_000


@pytest.mark.parametrize("size", [8_000_000, 100_000_000])
def test_what_is_freed_is_used_again_and_given_back_when_asked(size: int) -> None:
    page = 4096
    again, after = faults("keep_freed_memory()", size)
    assert again < 100
    assert after > 0.9 * size / page
