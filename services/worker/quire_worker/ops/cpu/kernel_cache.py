"""A cache on disk of the machine code of kernels, so that the second start of a worker does not compile them again.

A build is one version of the kernels on one kind of processor. The folder of a build is named by a digest of all that
the code depends on: the source of this package, the versions of numba and llvmlite, the processor and its features. The
worker executes the code. So the cache loads only files with the right checksum, from a folder that belongs to this user
and that no other user can write. If the folder cannot be used, the kernels are compiled in memory without an error. The
cache does not know what kernels compute.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Final

from numba.core.registry import cpu_target

from quire_common.serving.cache_folder import cache_folder

_DIGEST_BYTES: Final = 32
_MAX_AGE_S: Final = 30 * 24 * 3600.0
"""Folders of other builds are removed if nothing was added to them for this long."""
_WRITABLE_BY_OTHERS: Final = 0o022


class KernelCache:
    """The kernels of one build. Threads and processes may share the cache."""

    def __init__(self, folder: Path, build: str) -> None:
        """`folder` holds the folders of all builds. `build` is the name of this build's folder."""
        self._folder = folder / build

    def load(self, name: str) -> bytes | None:
        """Return the machine code of a kernel. Returns None if the file is missing or cannot be read, its checksum is
        wrong, or other users own or can write the folder."""
        try:
            if not self._is_trusted():
                return None
            content = self._path(name).read_bytes()
        except OSError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return code if digest == hashlib.sha256(code).digest() else None

    def store(self, name: str, code: bytes) -> None:
        """Store the machine code of a kernel behind its checksum, by renaming a temporary file. If the folder is new,
        remove old builds first. Store nothing if others own or can write the folder. An OSError is not raised; it may
        leave the temporary file."""
        with contextlib.suppress(OSError):
            if not self._folder.is_dir():
                self._remove_old_builds()
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted():
                with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                    file.write(hashlib.sha256(code).digest() + code)
                Path(file.name).replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _is_trusted(self) -> bool:
        status = self._folder.stat()
        return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS

    def _remove_old_builds(self) -> None:
        """Remove the folders of builds to which nothing was added for 30 days."""
        for other in self._folder.parent.iterdir() if self._folder.parent.is_dir() else ():
            if time.time() - other.stat().st_mtime > _MAX_AGE_S:
                shutil.rmtree(other, ignore_errors=True)


def open_kernel_cache() -> KernelCache:
    """Return the cache in the user's cache folder. Its build name is a digest of this package's source, the versions of
    numba and llvmlite, and the processor."""
    digest = hashlib.sha256()
    for part in (version("numba"), version("llvmlite"), *cpu_target.target_context.codegen().magic_tuple()):
        digest.update(part.encode() + b"\0")
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return KernelCache(cache_folder("kernels"), digest.hexdigest()[:32])
