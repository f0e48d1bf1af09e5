"""A pickle that leaves a trace when it is read."""

import pickle
from pathlib import Path


class Trace:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def malicious_pickle(trace: Path) -> bytes:
    """Unpickling it creates the file ``trace``."""
    data = pickle.dumps({"weight": Trace(trace)})
    pickle.loads(data)
    assert trace.exists(), "the pickle must create the file"
    trace.unlink()
    return data
