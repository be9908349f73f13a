"""PrivateNetwork: a network namespace and an address for each member of a stack, and a switch between them.

    with PrivateNetwork(["router", "worker"]) as network:
        network.hosts["worker"]      # 198.18.x.3, reached from here and from all of them
        network.prefix("worker")     # what to put in front of the command that is to run there

Only one interface of the network has a name on this machine: the one through which this machine reaches the members.
This process holds the namespaces by descriptors. When this process and all processes inside a namespace have ended, the
kernel removes the namespace with its content. So nothing stays, however this process ends. This module knows nothing of
services.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.errors import FailedPrecondition

_CLONE_NEWNET = 0x40000000
# For tests between networks, by RFC 2544: nobody routes them.
_NETWORK = "198.18"
_SUBNETS = 254
_MOST_NAMES = 250
_LIMIT_S = 20.0
_FIX = (
    "Run as root (CAP_NET_ADMIN and CAP_SYS_ADMIN) on Linux with iproute2 and util-linux, or leave namespaces out: "
    "--no-netns puts every member on a port of 127.0.0.1."
)
_numbers = itertools.count()


class PrivateNetwork:
    """A context manager. The constructor makes the namespaces and cables, for at most 250 names (else ValueError). It
    raises FailedPrecondition NO_NAMESPACES if a program is missing, this system or this user may not make namespaces,
    or no subnet is free."""

    def __init__(self, names: Sequence[str]) -> None:
        if len(names) > _MOST_NAMES:
            raise ValueError(f"{len(names)} names are more than a subnet has room for")
        self._tools = {tool: _find(tool) for tool in ("ip", "nsenter")}
        self._uplink = f"qr{os.getpid():x}x{next(_numbers):x}"
        self._descriptors: dict[str, int] = {}
        self._switch = _new_namespace()
        try:
            for name in names:
                self._descriptors[name] = _new_namespace()
            subnet = self._free_subnet()
            # This process's own.
            self.gateway = f"{subnet}.1"
            self.hosts = {name: f"{subnet}.{number}" for number, name in enumerate(names, 2)}
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefix(self, name: str) -> tuple[str, ...]:
        """Return the words to put before a command that is to run at a member's address. They replace themselves by
        that command, with the same pid."""
        return (self._tools["nsenter"], f"--net={self._path(self._descriptors[name])}", "--")

    def interface(self, name: str) -> str:
        """Return the name of the switch's end of a member's cable. Tests cut or slow down the cable there."""
        return f"q{list(self.hosts).index(name)}"

    def at_switch(self, *command: str, text: str = "") -> str:
        """Run a command in the namespace of the switch, through which all traffic passes. Returns its output. Raises
        the errors of `_run`."""
        return self._run(self._tools["nsenter"], f"--net={self._path(self._switch)}", "--", *command, text=text)

    def is_there(self) -> bool:
        """Whether the interface through which this machine reaches the members still exists."""
        return Path(f"/sys/class/net/{self._uplink}").exists()

    def close(self) -> None:
        """Remove the interface to this machine, and close the descriptors that hold the namespaces. Processes inside
        keep theirs until they end. If the interface cannot be removed, that is not reported (see `is_there`).
        Idempotent."""
        if self._switch >= 0:
            subprocess.run([self._tools["ip"], "link", "delete", self._uplink], capture_output=True, check=False)
            for descriptor in (self._switch, *self._descriptors.values()):
                os.close(descriptor)
            self._switch = -1

    def _build(self) -> None:
        """Make the switch, a cable from it to each member and one to this machine, and give each end its address and
        bring it up. Raises FailedPrecondition if a command fails."""
        here = f"/proc/{os.getpid()}/ns/net"
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        lines += [f"link add up0 type veth peer name {self._uplink} netns {here}", "link set up0 master br0 up"]
        for name, descriptor in self._descriptors.items():
            cable = self.interface(name)
            lines.append(f"link add {cable} type veth peer name eth0 netns {self._path(descriptor)}")
            lines.append(f"link set {cable} master br0 up")
        self.at_switch(self._tools["ip"], "-batch", "-", text="\n".join(lines))
        for name, host in self.hosts.items():
            inside = f"link set lo up\naddress add {host}/24 dev eth0\nlink set eth0 up"
            self._run(*self.prefix(name), self._tools["ip"], "-batch", "-", text=inside)
        outside = f"address add {self.gateway}/24 dev {self._uplink}\nlink set {self._uplink} up"
        self._run(self._tools["ip"], "-batch", "-", text=outside)

    def _free_subnet(self) -> str:
        """Return a subnet of 198.18.0.0/16, as its first three numbers, in which this machine has no address; the pid
        decides where the search begins. Raises FailedPrecondition if all are taken."""
        taken = self._run(self._tools["ip"], "-4", "-oneline", "address")
        for offset in range(_SUBNETS):
            subnet = f"{_NETWORK}.{(os.getpid() + offset) % _SUBNETS + 1}"
            if f" {subnet}." not in taken:
                return subnet
        raise FailedPrecondition("NO_NAMESPACES", f"All of {_NETWORK}.0.0/16 is in use here.", _FIX)

    def _path(self, descriptor: int) -> str:
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def _run(self, *command: str, text: str = "") -> str:
        """Run a command, with `text` as its input, and return its standard output. Raises FailedPrecondition
        NO_NAMESPACES if it cannot be run, with the system's reason, or if it fails, with the first line of its standard
        error. Raises subprocess.TimeoutExpired after 20 s."""
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except OSError as error:
            raise FailedPrecondition("NO_NAMESPACES", f"{command[0]}: {error.strerror}.", _FIX) from error
        if done.returncode:
            words = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            raise FailedPrecondition("NO_NAMESPACES", f"A private network cannot be set up here: {words}.", _FIX)
        return done.stdout


def _find(tool: str) -> str:
    """Return the path of a program, also from the folders for administrators. Raises FailedPrecondition if it is not
    installed."""
    found = shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise FailedPrecondition("NO_NAMESPACES", f"Network namespaces need {tool!r}, a program.", _FIX)
    return found


def _new_namespace() -> int:
    """Make an empty network namespace, and return its descriptor. A separate thread makes it, since each thread has its
    own namespaces. Raises FailedPrecondition if the kernel refuses to make or to open it."""
    made: list[int] = []
    thread = threading.Thread(target=_unshare, args=(made,), name="namespace")
    thread.start()
    thread.join()
    if made[0] < 0:
        raise FailedPrecondition("NO_NAMESPACES", f"A network namespace was refused: {os.strerror(-made[0])}.", _FIX)
    return made[0]


def _unshare(made: list[int]) -> None:
    """Move this thread to a new network namespace. Appends the namespace's descriptor to `made`, or the negative number
    of an error."""
    if sys.platform != "linux":
        made.append(-errno.ENOSYS)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        made.append(-ctypes.get_errno())
        return
    try:
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:  # no /proc is mounted, or this process has too many files open
        made.append(-(error.errno or errno.EIO))
