"""Counts the cores that this process may use: its affinity, and the quotas of the cgroups (version 1 or 2) it is in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
# The form of a space, tab, line break, backslash or number sign in mountinfo.
_ESCAPE = re.compile(r"\\([0-7]{3})")


class _Mount(NamedTuple):
    version: int
    root: str
    """Path of the cgroup that is mounted there."""
    folder: Path


def usable_cores(root: Path = _ROOT, affinity: int | None = None) -> int:
    """Return the number of cores that this process may use by affinity and cgroup quotas, at least 1. A quota is
    rounded down to whole cores: a thread with a fraction of a core would be throttled within each step, and the others
    would wait for it. `root` holds `proc` and `sys`."""
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroups and of their parents up to the mount. Groups without a
    quota are left out."""
    groups = dict(_groups(_text(root / "proc/self/cgroup")))
    for mount in _mounts(root):
        group = groups.get(mount.version)
        if group is None:
            continue
        # A container that sees the host's path, and of the file system only its own group, finds its own at the mount.
        top = mount.root.rstrip("/")
        inside = group.removeprefix(top).strip("/") if f"{group}/".startswith(f"{top}/") else ""
        folder = mount.folder / inside
        if not folder.is_dir():
            folder = mount.folder
        for each in (folder, *folder.parents):
            quota = _quota(each, mount.version)
            if quota is not None:
                yield quota
            if each == mount.folder:
                break


def _quota(folder: Path, version: int) -> float | None:
    """Read the CPU quota of one cgroup, in cores; None if it has no quota."""
    if version == 2:
        words = _text(folder / "cpu.max").split()
    else:
        words = [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdigit() for word in words):  # without a quota, it is "max" or -1
        return None
    quota_us, period_us = map(int, words)
    return quota_us / period_us if period_us else None


def _groups(text: str) -> Iterator[tuple[int, str]]:
    """Parse /proc/self/cgroup, whose lines are `number:controllers:path`: yield cgroup version and path of those that
    concern the processor."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "cpu" in controllers.split(","):
            yield 1, path


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yield the mounted cgroup file systems that concern the processor, as /proc/self/mountinfo lists them: those of
    version 2, and those of version 1 with the controller cpu. Yields nothing if the list cannot be read."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        fields, kind = mount.split(), system.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        top, place = (_ESCAPE.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        folder = root / place.lstrip("/")
        if kind[0] == "cgroup2":
            yield _Mount(2, top, folder)
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            yield _Mount(1, top, folder)


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
