"""Reports the progress of a download by another program or library, from the size of the folder that receives it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[int, int], None]
"""(bytes downloaded, bytes in all)."""
_POLL_S = 0.2


@contextlib.contextmanager
def report_folder_growth(folder: Path, total_bytes: int, progress: Progress) -> Iterator[None]:
    """Within the context, call `progress(done, total_bytes)` five times a second, from a thread of its own. `done` is
    the number of bytes by which the folder has grown, at most `total_bytes`. When the context has ended, no more calls
    come."""
    stopped, initial_bytes = threading.Event(), folder_bytes(folder)

    def poll() -> None:
        while not stopped.wait(_POLL_S):
            progress(max(0, min(folder_bytes(folder) - initial_bytes, total_bytes)), total_bytes)

    watcher = threading.Thread(target=poll, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stopped.set()
        watcher.join()


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below the folder. Another program may create, move and remove files and
    folders meanwhile."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):  # leaves out folders that are gone when it comes to them
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += Path(parent, name).lstat().st_size
    return total_bytes
