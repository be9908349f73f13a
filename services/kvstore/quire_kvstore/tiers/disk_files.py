"""DiskFiles: one file per page in a folder of sub-folders. It knows nothing of capacity or eviction.

    <root>/3f/3f9c...e1.page    the framed page, padded with zeros to 4 KiB; its name is a hash of its key

A file is written under a temporary name and then renamed, so a page is either complete or absent. Files are not synced;
if a power failure leaves a page half written, its checksum shows this like any other damage. If the filesystem allows
it, writes and reads bypass the system's cache (O_DIRECT). If the caller's memory is aligned, they need no copy, except
of an incomplete last block. Files with other names are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quire_common.pages import HEADER_BYTES, PageCorrupt, PageHeader
from quire_kvstore.tiers.aligned import BLOCK_BYTES, AlignedBuffers, copy_bytes, is_aligned, skip_bytes, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.pages import PageKey

T = TypeVar("T")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{40}\.page")
_TEMPORARY = re.compile(r"[0-9a-f]{40}\.page\.\d+\.tmp")
_GROUP = struct.Struct("<I")
# What says of the file that its page is lost: it is not there (or something else is in its place), or its blocks cannot
# be read. Other errors, such as too many open files, say nothing about it.
PAGE_LOST = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO)


@dataclass(frozen=True)
class FoundPage:
    """A page that a scan found; `size` with its header. `stamp_ns` orders them by use."""

    key: PageKey
    size: int
    stamp_ns: int


@dataclass
class ScanFigures:
    """What a scan came across beside pages: files that are not ours, files of ours that were no good, and files of ours
    that could not be read for a reason that may pass (`unread_reason` is that of the last one)."""

    foreign: int = 0
    removed: int = 0
    unread: int = 0
    unread_reason: str = ""


class DiskFiles:
    """The page files of a folder. Methods raise OSError, and several threads may call them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._direct = hasattr(os, "O_DIRECT")
        self._zero_copy_works = True
        self._numbers = itertools.count()
        self._buffers = AlignedBuffers()
        self._lock_fd = -1

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the system's cache."""
        return self._direct

    def open(self) -> None:
        """Make the folder if need be, and lock it for this process until `close`. Raises BlockingIOError if another
        process has locked it."""
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(mode=0o700, parents=True)
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def require_free(self, size: int) -> None:
        """Raise OSError (ENOSPC) if the filesystem has fewer than `size` bytes free. Called before each write of a
        page, with the page's size and the bytes that must stay free. Does nothing if the folder is missing, since the
        write makes it again."""
        try:
            status = os.statvfs(self._root)
        except FileNotFoundError:
            return  # it is made again when it is written to
        if status.f_bavail * status.f_frsize < size:
            raise OSError(errno.ENOSPC, "less is free than is to be left free")

    def path(self, key: PageKey) -> Path:
        """Return the path of a page's file, a hash of the page's key, whether the file exists or not."""
        packed = key.namespace + key.hash + _GROUP.pack(key.group)
        name = hashlib.blake2b(packed, digest_size=20).hexdigest()
        return self._root / name[:2] / f"{name}.page"

    def write(self, key: PageKey, framed: memoryview, stamp_ns: int) -> None:
        """Write a framed page to its file, and set the file's time to `stamp_ns`. An earlier file of the page is
        replaced. If the write fails, OSError is raised, and the new file is removed if the disk lets that; otherwise
        the next `scan` tries again."""
        self._with_fallback(lambda: self._write(key, framed, stamp_ns))

    def read(self, key: PageKey, into: memoryview, stamp_ns: int) -> int:
        """Read a framed page of the length of `into`, and set the file's time to `stamp_ns` if the disk lets that.
        Returns the number of bytes read; 0 if the file has another length. The content is not checked. Raises OSError
        if the file is missing or cannot be read."""
        return self._with_fallback(lambda: self._read(key, into, stamp_ns))

    def remove(self, key: PageKey) -> None:
        """Remove a page's file. Does nothing if there is none."""
        self.path(key).unlink(missing_ok=True)

    def scan(self, figures: ScanFigures) -> list[FoundPage]:
        """Return all pages by their headers, the most recently used one last; bodies are not read. Temporary files are
        removed, and so are page files that are lost, or whose header is damaged or does not fit their place or length.
        Files that cannot be read for another reason, such as too many open files, stay, and so do files that are none
        of ours. `figures` counts the removed files, also those that could not be removed, the unread ones, and the
        foreign ones (a foreign folder as one). Raises OSError if a folder cannot be listed."""
        found: list[FoundPage] = []
        for folder in os.scandir(self._root):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                figures.foreign += 1
                continue
            for entry in os.scandir(folder.path):
                temporary = _TEMPORARY.fullmatch(entry.name)
                if not (temporary or _PAGE.fullmatch(entry.name)) or not entry.is_file(follow_symlinks=False):
                    figures.foreign += 1
                    continue
                try:
                    page = None if temporary else self._read_header(entry)
                except OSError as error:
                    figures.unread += 1
                    figures.unread_reason = str(error)
                    continue
                if page:
                    found.append(page)
                else:
                    figures.removed += 1
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108  # an entry of scandir is a string already
        found.sort(key=lambda page: page.stamp_ns)
        return found

    def _write(self, key: PageKey, framed: memoryview, stamp_ns: int) -> None:
        """Write the page to a temporary file, padded with zeros to whole blocks and with `stamp_ns` as its time, then
        rename it. Blocks go to the disk without a copy if the memory is aligned and the disk takes direct transfers. On
        failure the temporary file is removed, if the disk lets that, and OSError is raised."""
        path = self.path(key)
        temporary = path.with_name(f"{path.name}.{next(self._numbers)}.tmp")
        zero_copy = self._zero_copy_bytes(framed)
        tail = framed[zero_copy:]
        with self._buffers.borrow(whole_blocks(len(tail))) as rest:
            copy_bytes(rest[: len(tail)], tail)
            rest[len(tail) :] = bytes(len(rest) - len(tail))
            try:
                fd = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    self._write_all(fd, framed[:zero_copy], rest)
                    os.utime(fd, ns=(stamp_ns, stamp_ns))
                finally:
                    os.close(fd)
                temporary.rename(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def _read(self, key: PageKey, into: memoryview, stamp_ns: int) -> int:
        """Read the page's file into `into`, and set the file's time to `stamp_ns`, if the disk lets that. Returns the
        number of bytes read; 0 if the file has another length. Aligned blocks come from the disk without a copy. Raises
        OSError if the file is missing or cannot be read."""
        fd = self._open(self.path(key), os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != whole_blocks(len(into)):
                return 0
            zero_copy = self._zero_copy_bytes(into)
            tail = into[zero_copy:]
            with self._buffers.borrow(whole_blocks(len(tail))) as rest:
                got = _read_all(fd, [into[:zero_copy], rest])
                copy_bytes(tail, rest[: len(tail)])
            with contextlib.suppress(OSError):  # a read-only disk cannot note it
                os.utime(fd, ns=(stamp_ns, stamp_ns))
            return min(got, len(into))
        finally:
            os.close(fd)

    def _read_header(self, entry: os.DirEntry[str]) -> FoundPage | None:
        """Return the page that the file's header describes; None if the file is lost, the header is damaged, or the
        file is not at the page's path or has not the page's length. Raises OSError for an error that says nothing about
        the page."""
        try:
            # O_NONBLOCK for a pipe that has come into the file's place since it was listed; `pread` refuses it.
            fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status, head = os.fstat(fd), os.pread(fd, HEADER_BYTES, 0)
            finally:
                os.close(fd)
            header = PageHeader.unpack(head)
        except PageCorrupt:
            return None
        except OSError as error:
            if error.errno not in PAGE_LOST:
                raise
            return None
        size = HEADER_BYTES + header.length
        if status.st_size != whole_blocks(size) or self.path(header.key) != Path(entry.path):
            return None
        return FoundPage(header.key, size, status.st_mtime_ns)

    def _open(self, path: Path, flags: int) -> int:
        """Open a regular file, with O_DIRECT where the filesystem takes it, and return its descriptor. Once refused,
        O_DIRECT is off for all later files. For a file to be written, missing folders are made. Raises OSError if the
        file cannot be opened; this is FileNotFoundError if the path is missing, or is a pipe or the like. A symbolic
        link is refused too."""
        # Somebody may have put a pipe in the file's place: without O_NONBLOCK its open would never return.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        for _ in range(3):
            direct = self._direct
            try:
                fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                self._root.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the cache
                path.parent.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                if path.exists() and not path.is_file():  # a folder or pipe: no filesystem opens it with O_DIRECT
                    raise FileNotFoundError(errno.ENOENT, "no file", str(path)) from None
                self._direct = False  # such as tmpfs before Linux 6.6
            else:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    os.close(fd)
                    raise FileNotFoundError(errno.ENOENT, "no file", str(path))
                return fd
        raise FileNotFoundError(errno.ENOENT, "the folder does not stay", str(path))

    def _zero_copy_bytes(self, framed: memoryview) -> int:
        """Return how many leading bytes of this memory the disk can read or write directly: its whole blocks. Returns 0
        if the memory is not aligned, or the disk does not allow that."""
        return len(framed) // BLOCK_BYTES * BLOCK_BYTES if self._zero_copy_works and is_aligned(framed) else 0

    def _with_fallback(self, act: Callable[[], T]) -> T:
        """Run `act`, which transfers straight from or to the caller's memory, and return its result. If the disk
        refuses that (EINVAL), run `act` once more; it then copies the whole page through aligned memory, and so does
        every later read and write. This leaves O_DIRECT as it is."""
        zero_copy = self._zero_copy_works
        try:
            return act()
        except OSError as error:
            if error.errno != errno.EINVAL or not zero_copy:
                raise
            self._zero_copy_works = False
            return act()

    def _write_all(self, fd: int, zero_copy: memoryview, rest: memoryview) -> None:
        """Write both parts to the file, one after the other, in as many calls as necessary. If the filesystem refuses
        O_DIRECT (EINVAL) and `zero_copy` is empty, O_DIRECT is switched off and the write repeated. Raises OSError
        otherwise, and for a write that ends inside a block."""
        parts = [zero_copy, rest]
        done, size = 0, sum(map(len, parts))
        while done < size:
            try:
                count = os.pwritev(fd, skip_bytes(parts, done), done)
            except OSError as error:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT or zero_copy:
                    raise
                self._direct = False  # it let us open the file so, but does not mean it
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if count % BLOCK_BYTES and done + count < size:
                raise OSError(errno.ENOSPC, "a write was cut short")
            done += count


def _read_all(fd: int, parts: list[memoryview]) -> int:
    """Fill the parts from the beginning of the file. Returns how many bytes came before the file ended."""
    got, size = 0, sum(map(len, parts))
    while got < size:
        count = os.preadv(fd, skip_bytes(parts, got), got)
        if count == 0:
            break
        got += count
    return got
