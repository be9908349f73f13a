"""Checks of this machine's cores, memory, disk, files and clock. On systems other than Linux, the memory is unknown,
and so is whether the clock is synchronized; /dev/shm is reported as missing. The other checks work there too."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from pathlib import Path

from quire.doctor.finding import Finding, ok, warning
from quire.local.spec import usable_cores
from quire.local.state import base_directory

_GIB = 1 << 30
_LEAST_CORES = 2
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 2 * _GIB, 2 * _GIB, _GIB // 2
_LEAST_FILES = 4096
# adjtimex(2): the kernel's clock is not kept in step by anybody.
_STA_UNSYNC = 0x40


def check_cores() -> Finding:
    """Warn of fewer than two cores for this process, since five processes share them."""
    cores = usable_cores()
    if cores < _LEAST_CORES:
        return warning("cores", f"{cores} core", f"Give at least {_LEAST_CORES}: services and worker share them.")
    return ok("cores", f"{cores} cores")


def check_memory() -> Finding:
    """Report how much memory is available now, and warn if it is less than 2 GiB. On a system without /proc/meminfo,
    the finding is ok, and says that the memory is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        facts = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        available = facts["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return ok("memory", "unknown on this system")
    found = f"{available / _GIB:.1f} of {facts['MemTotal'] / _GIB:.1f} GiB available"
    if available < _LEAST_MEMORY:
        return warning("memory", found, "Five services need about 1 GiB beside the model and its KV pages.")
    return ok("memory", found)


def check_shared_memory() -> Finding:
    """Warn if /dev/shm is missing or has less than 512 MiB free: pages travel through it between processes of a
    host."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return warning("/dev/shm", "there is none", "Pages then travel by gRPC, which is slower.")
    if free < _LEAST_SHARED:
        return warning("/dev/shm", f"{free / _GIB:.2f} GiB free", "In a container, raise --shm-size.")
    return ok("/dev/shm", f"{free / _GIB:.1f} GiB free")


def check_disk() -> Finding:
    """Warn if Quire's state folder (or else its nearest parent that exists) cannot be written, or if its disk has less
    than 2 GiB free. Stacks keep their logs on it, and temporary stacks also the kvstore's pages."""
    place = base_directory()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return warning("disk", f"{place} cannot be written", "Set QUIRE_STATE_DIR to a folder that can.")
    if free < _LEAST_DISK:
        return warning("disk", found, "Free some, or set QUIRE_STATE_DIR to another disk.")
    return ok("disk", found)


def check_files() -> Finding:
    """Warn of a limit of fewer than 4096 open files, since a router has one per client."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _LEAST_FILES:
        return warning("files", f"{soft} open files at most", f"`ulimit -n {_LEAST_FILES}` or more: one per client.")
    return ok("files", f"{soft} open files at most")


def check_clock() -> Finding:
    """Warn of a clock that jumps by more than 10 ms within 50 ms, or that is not synchronized. Certificates are checked
    by this clock, and logs and traces have its times; deadlines do not depend on it. If the kernel does not say whether
    NTP keeps the clock, the finding is ok."""
    before_s = time.time() - time.monotonic()
    time.sleep(0.05)
    jump_s = abs(time.time() - time.monotonic() - before_s)
    if jump_s > 0.01:
        return warning("clock", f"it jumped by {jump_s * 1000:.0f} ms", "Something sets it hard: let NTP slew it.")
    synchronised = _synchronised()
    if synchronised is None:
        return ok("clock", "steady; whether NTP keeps it is unknown")
    if not synchronised:
        return warning("clock", "steady, but nobody keeps it in step", "Between several machines, run NTP or chrony.")
    return ok("clock", "steady, and kept in step")


def _synchronised() -> bool | None:
    """Whether the kernel reports a synchronized clock; None if it cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = (ctypes.c_long * 64)()
        if libc.adjtimex(ctypes.byref(timex)) < 0:
            return None
        # struct timex on 64 bits: modes (int, padded), offset, freq, maxerror, esterror, then status (int).
        return not timex[5] & _STA_UNSYNC
    except (OSError, AttributeError):
        return None
