"""Starts a member of a stack from the source tree that FOLDER/MEMBER names: `launch.py FOLDER MEMBER FLAGS...`.

The supervisor starts this program in place of the service. What the file says when a process starts is what counts, so
that a restart changes the release.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SERVICES = ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")


def python_path(tree: Path) -> str:
    """The value of PYTHONPATH with which all packages come from a tree."""
    return os.pathsep.join(map(str, (tree, *(tree / "services" / name for name in SERVICES))))


def main() -> None:
    folder, member, *flags = sys.argv[1:]
    tree = Path((Path(folder) / member).read_text())
    service = member.partition("-")[0]
    # Children of the service find the same tree.
    environment = {**os.environ, "PYTHONPATH": python_path(tree)}
    os.execve(sys.executable, [sys.executable, "-m", f"quire_{service}", *flags], environment)


if __name__ == "__main__":
    main()
