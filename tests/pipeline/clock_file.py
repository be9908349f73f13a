"""ClockFile: by how much the clocks of a stack's processes are ahead; see tests/fakes/jumping_clock."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent.parent / "fakes" / "jumping_clock"
HOUR_S = 3600.0


class ClockFile:
    """Made before the stack, whose processes inherit the environment."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._ahead_ns = 0
        self._write()
        patch.setenv("QUIRE_FAKE_CLOCK", str(path))
        # Before what is there: the stack's code may be found by it.
        patch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)

    def jump(self, seconds: float) -> None:
        """All clocks of all processes, at once."""
        self._ahead_ns += int(seconds * 1e9)
        self._write()

    def _write(self) -> None:
        # In place: it is mapped. Eight bytes at once are never read half.
        with self._path.open("r+b" if self._path.exists() else "w+b") as file:
            file.write(struct.pack("<q", self._ahead_ns))
