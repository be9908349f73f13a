"""The disk folder in which a local stack's kvstore keeps KV pages, and its size limit. This module knows nothing of
pages.

A lasting stack (`quire up`, `quire serve`) may be started again under its name. Its pages are in the user's cache
folder, so that its next start finds them. Cache folders are not backed up, and the user may delete them at any time. A
temporary stack (`LLM`, `quire demo`) has its pages in its own directory, which is removed with the stack. Only the user
may read either folder, because pages reveal the prompts.
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
    """Return the folder for pages of the stack of this name. It is in the user's cache folder if the pages are
    `lasting`, else in the stack's own directory."""
    if not lasting:
        return StateDirectory(name).path / _OWN
    return cache_folder(_OWN) / name


def kvstore_environment(name: str, *, lasting: bool) -> dict[str, str]:
    """Return the variables that tell the kvstore where to keep pages on disk, and how many bytes: 8 GiB, but 2 GiB of
    the disk stay free. `lasting`: the pages outlive the stack (see `pages_folder`). The variables are defaults, which
    the user's own variables and flags override."""
    return {
        "QUIRE_KVSTORE_DISK_PATH": str(pages_folder(name, lasting=lasting)),
        "QUIRE_KVSTORE_DISK_BYTES": str(DISK_BYTES),
        "QUIRE_KVSTORE_DISK_KEEP_FREE_BYTES": str(KEEP_FREE_BYTES),
    }


def remove_own_pages(directory: StateDirectory) -> None:
    """Remove the pages of a temporary stack that has ended."""
    shutil.rmtree(directory.path / _OWN, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the pages of temporary stacks whose supervisors were killed, in all state directories. A stack whose lock
    is held by a process lives, and keeps its pages. What cannot be removed stays, without an error."""
    for folder in base_directory().glob(f"*/{_OWN}"):
        try:
            with (folder.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it lives, or is none of ours
