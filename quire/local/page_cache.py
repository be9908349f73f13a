"""Where a local stack's kvstore keeps KV pages on disk, and how much of the disk is its. Knows nothing of pages.

A stack that is to come again under its name (`quire up`, `quire serve`) keeps them in the user's cache, so that it
finds them again: caches are not backed up, and may be deleted at any time. One that is for once (`LLM`, `quire demo`)
keeps them in its own directory, and they end with it. Nobody but the user may look into either: pages say what was
asked.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from quire.cache_folder import cache_folder
from quire.local.state import StateDirectory, base_directory

# Room for pages, and what is left to others of a disk that has less.
DISK_BYTES = 8 << 30
KEEP_FREE_BYTES = 2 << 30
_OWN = "pages"


def pages_folder(name: str, *, lasting: bool) -> Path:
    """Return the folder for pages of the stack of this name: in the user's cache if they are `lasting`, else in the
    stack's own directory."""
    if not lasting:
        return StateDirectory(name).path / _OWN
    return cache_folder(_OWN) / name


def kvstore_environment(name: str, *, lasting: bool) -> dict[str, str]:
    """Return the variables that tell the kvstore where and how much to keep on disk, unless its user says otherwise."""
    return {
        "QUIRE_KVSTORE_DISK_PATH": str(pages_folder(name, lasting=lasting)),
        "QUIRE_KVSTORE_DISK_BYTES": str(DISK_BYTES),
        "QUIRE_KVSTORE_DISK_KEEP_FREE_BYTES": str(KEEP_FREE_BYTES),
    }


def remove_own_pages(directory: StateDirectory) -> None:
    """Those of a stack for once, which has ended."""
    shutil.rmtree(directory.path / _OWN, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove pages of stacks for once whose supervisors were killed, which shows in that nobody holds their locks."""
    for folder in base_directory().glob(f"*/{_OWN}"):
        try:
            with (folder.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it lives, or is none of ours
