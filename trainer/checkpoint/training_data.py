"""Whether a resumed run trains on the data that its checkpoint was saved with: its position is a row of these files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from workers.controller.logs import announce

BLOCK, STRIDE, WHOLE = 2**14, 2**20, 2**24


def content_of(files: Iterable[Path]) -> str:
    """Hash of files: names, sizes, and content; of a file beyond WHOLE bytes a block of every STRIDE. Equal for a copy."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        block, stride = (BLOCK, STRIDE) if size > WHOLE else (STRIDE, STRIDE)
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(block))
    return digest.hexdigest()


class TrainingData:
    """Content of data.train_files, saved in checkpoints; reports other content when one is loaded."""

    def __init__(self, files: Sequence[str]) -> None:
        # Others are names that a data set class of the user's reads.
        self._files = [path for path in (Path(name).expanduser() for name in files) if path.is_file()]
        self._content = content_of(self._files)

    def state(self) -> dict[str, str]:
        return {"content": self._content}

    def differs(self, state: Mapping[str, str]) -> bool:
        """Whether the content is not that of ``state``; not for a checkpoint of an earlier version, whose state is empty."""
        return bool(self._files) and state.get("content", self._content) != self._content

    def load(self, state: dict[str, str]) -> None:
        if self.differs(state):
            names = ",".join(map(str, self._files))
            announce(
                [f"data.train_files={names}: other content than at the checkpoint; rows may be repeated or left out from here"]
            )
