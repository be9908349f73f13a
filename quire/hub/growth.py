"""Watches a folder into which another program or library downloads: how far a download is, by the bytes on disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[int, int], None]
"""(bytes that are there, bytes in all)."""
_POLL_S = 0.2


@contextlib.contextmanager
def watching(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """A context in which `progress` is called several times a second, from a thread of its own, with the bytes by which
    the folder has grown, at most `total`."""
    ended, before = threading.Event(), size_of(folder)

    def watch() -> None:
        while not ended.wait(_POLL_S):
            progress(max(0, min(size_of(folder) - before, total)), total)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def size_of(folder: Path) -> int:
    """Return the bytes of all files below the folder, while another program makes and moves files in it."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total
