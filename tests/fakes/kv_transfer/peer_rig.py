"""Workers that exchange pages, without an engine: a pool of bytes, a door and a real KV transfer agent process each."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove, RankAddress
from quire_common.errors import Unavailable
from quire_worker.config import WorkerConfig
from quire_worker.engine.transfer_agent import MoveResult
from quire_worker.kv_transfer.agent_process import COMMAND, AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.peers.peer_access import host_id
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.side_process.frames import Frame
from quire_worker.side_process.process_link import LinkTimeouts
from tests.certificates import TlsFiles
from tests.fakes.kv_transfer.agent_rig import BytesPool, digest

WAIT_S = 60.0
PAGE_BYTES = 64 << 10
EMPTY = b"." * PAGE_BYTES
NAMESPACE = b"n" * 32
KEY = b"k" * 32
NO_TLS = TlsFiles("", "", "")
# The engine's signs of life are those of a worker; it gives its KV transfer agent more time than they do.
PATIENT = LinkTimeouts(silent_pings=100, start_pings=600, first_backoff_s=0.01, max_backoff_s=0.1)


def content(number: int) -> bytes:
    return number.to_bytes(2, "big") * (PAGE_BYTES // 2)


class SharedPools:
    """Stands for GPUs of one host: pools that others read by themselves, by descriptor. `held`: reads do not end."""

    def __init__(self) -> None:
        self.pools: dict[bytes, BytesPool] = {}
        self.fetched: list[list[int]] = []
        self.held = False

    def descriptor(self, pool: BytesPool) -> bytes:
        descriptor = f"pool {len(self.pools)} of ".encode() + host_id()
        self.pools[descriptor] = pool
        return descriptor


class PoolReader(HostCopier):
    """Implements Copier."""

    def __init__(self, pool: BytesPool, ring: Ring, shared: SharedPools) -> None:
        super().__init__(pool, ring)
        self._own = pool
        self._shared = shared
        self._marked = 0
        self._passed = 0

    def fetch(self, memory: bytes, source: np.ndarray, target: np.ndarray) -> None:
        theirs = self._shared.pools.get(memory)
        if theirs is None:
            raise Unavailable("CUDA_DRIVER", "It cannot be opened.", "Use another way.")
        self._shared.fetched.append(source.tolist())
        for taken, given in zip(source.tolist(), target.tolist(), strict=True):
            self._own.write_page(given, theirs.read_page(taken))

    def record_event(self) -> int:
        self._marked += 1
        return self._marked

    def is_complete(self, ticket: int) -> bool:
        if not self._shared.held:
            self._passed = self._marked
        return ticket <= self._passed

    def drain(self) -> None:
        self._passed = self._marked


class PeerSide:
    """One worker. Page n of its pool holds `content(n)` until it is written; what is exported is called by number.

    `told` are the moves that have ended, each checked to be told once. `slots` of the ring: half for pulls.
    """

    def __init__(
        self,
        stir: threading.Event,
        *,
        slots: int = 16,
        transport: str = "auto",
        num_pages: int = 64,
        shared: SharedPools | None = None,
        tls: TlsFiles = NO_TLS,
        page_mac_key: str = "",
        peer_hosts: tuple[str, ...] = (),
        command: Sequence[str] = COMMAND,
        await_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._await_all = await_all
        self.pool = BytesPool(num_pages, PAGE_BYTES)
        self.pool.pages = [content(page) for page in range(num_pages)]
        self.slots = slots
        self.told: dict[int, MoveResult] = {}
        self.door = PeerListeners(WorkerConfig(peer_transport=transport, peer_hosts=peer_hosts))
        shares = shared is not None and self.door.advertise_memory(shared.descriptor(self.pool))
        setup = AgentSetup(
            "", NAMESPACE.hex(), "int32", PAGE_BYTES, slots, peers=True, peer_transport=transport, shares_memory=shares,
            log_format="pretty", peer_grpc=self.door.grpc_listen, tls_cert=tls.cert, tls_key=tls.key, tls_ca=tls.ca,
            page_mac_key=page_mac_key, peer_hosts=self.door.peer_hosts,
        )  # fmt: skip
        ring = Ring.create(PAGE_BYTES, slots)
        copier = HostCopier(self.pool, ring) if shared is None else PoolReader(self.pool, ring, shared)
        self.transfer_agent = AgentProcess(
            setup, ring, copier, command=command, timeouts=PATIENT, inherited=self.door.inherited_fds
        )
        self.transfer_agent.wake = stir.set
        self._heard_of = 0
        link = self.transfer_agent._link
        pass_on = link._queue_frames

        def heard(frames: Sequence[Frame]) -> None:
            self._heard_of = link._incarnation
            stir.set()
            pass_on(frames)

        link._queue_frames = heard  # type: ignore[method-assign]  # the first frame of a process says that it serves

    @property
    def serves(self) -> bool:
        """Whether the present process has started: on a busy machine that takes longer than a puller is patient."""
        return self._heard_of == self.transfer_agent._link._incarnation

    @property
    def sources(self) -> tuple[RankAddress, ...]:
        return self.door.addresses

    def export(self, move_id: int, *pages: int, key: bytes = KEY, offered: int | None = None) -> None:
        hashes = tuple(digest(page) for page in pages)
        assert self.transfer_agent.submit(
            PageMove(move_id, MoveKind.EXPORT, 0, ids(*pages), hashes, b"id", lease_key=key)
        )
        self.transfer_agent.offer_pages(move_id, len(pages) if offered is None else offered)

    def pull(
        self, move_id: int, sources: tuple[RankAddress, ...], numbers: list[int], targets: list[int], *,
        key: bytes = KEY, first: int = 0,
    ) -> None:  # fmt: skip
        """Once there is a process on every side."""
        self._await_all()
        for page in targets:
            self.pool.pages[page] = EMPTY
        hashes = tuple(digest(number) for number in numbers)
        move = PageMove(
            move_id, MoveKind.PULL, 0, ids(*targets), hashes, b"id", lease_key=key, first_index=first, source=sources
        )
        assert self.transfer_agent.submit(move)

    def collect(self) -> None:
        for result in self.transfer_agent.take_results():
            assert result.id not in self.told, "a move ended twice"
            self.told[result.id] = result

    def came(self, move_id: int) -> int | None:
        """How many pages of a move came; None while it runs."""
        return self.told[move_id].pages if move_id in self.told else None

    @property
    def pid(self) -> int:
        until = time.monotonic() + WAIT_S
        while (pid := self.transfer_agent.pid) is None:
            assert time.monotonic() < until, "no process came"
            time.sleep(0.01)
        return pid

    def signal(self, number: int) -> None:
        """Send the signal. After SIGSTOP, wait until the process has stopped: on a busy machine it runs for a while."""
        os.kill(self.pid, number)
        limit = time.monotonic() + 10.0
        while number == signal.SIGSTOP and not self._stopped():
            assert time.monotonic() < limit, "the process has not stopped"
            time.sleep(0.001)

    def _stopped(self) -> bool:
        """Return whether all threads of the process are stopped."""
        states = (
            path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{self.pid}/task").glob("*/stat")
        )
        return all(state == "T" for state in states)

    def sockets(self) -> int:
        """Of the process: its own to the engine, its listeners, and each connection."""
        folder = Path(f"/proc/{self.pid}/fd")
        with contextlib.suppress(OSError):
            return sum(str(fd.readlink()).startswith("socket:") for fd in list(folder.iterdir()))
        return 0

    @property
    def idle_sockets(self) -> int:
        return 1 + len(self.door.inherited_fds) + bool(self.door.grpc_listen)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.signal(signal.SIGCONT)
        self.transfer_agent.close()
        self.door.close()


class PeerRig:
    """Any number of sides, and one thread that is the model thread of all."""

    def __init__(self) -> None:
        self._stir = threading.Event()
        self.sides: list[PeerSide] = []

    def side(
        self,
        *,
        slots: int = 16,
        transport: str = "auto",
        shared: SharedPools | None = None,
        tls: TlsFiles = NO_TLS,
        page_mac_key: str = "",
        peer_hosts: tuple[str, ...] = (),
        command: Sequence[str] = COMMAND,
    ) -> PeerSide:
        self.sides.append(
            PeerSide(
                self._stir,
                slots=slots,
                transport=transport,
                shared=shared,
                page_mac_key=page_mac_key,
                peer_hosts=peer_hosts,
                tls=tls,
                command=command,
                await_all=self._until_all_serve,
            )
        )
        return self.sides[-1]

    def _until_all_serve(self) -> None:
        self.until(lambda: all(side.serves for side in self.sides))

    def until(self, condition: Callable[[], bool], limit_s: float = WAIT_S) -> float:
        """Go on until something has happened; returns how long that took, in seconds."""
        began = time.monotonic()
        while True:
            self._stir.clear()
            for side in self.sides:
                side.collect()
            if condition():
                return time.monotonic() - began
            assert time.monotonic() - began < limit_s, [side.told for side in self.sides]
            self._stir.wait(0.05)

    def go_on_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until)

    def assert_nothing_left(self) -> None:
        """No connection, no slot and no export: with one lost, as many pages as the ring has would not pass."""
        for side in self.sides:
            self.until(lambda side=side: side.sockets() == side.idle_sockets)  # type: ignore[misc]  # a lambda's default
        for number, (source, target) in enumerate(zip(self.sides, self.sides[1:] + self.sides[:1], strict=True)):
            pages = list(range(1, 21))
            key = bytes([200 + number]) * 32
            source.export(9000 + number, *pages, key=key)
            target.pull(9100 + number, source.sources, pages, [page + 40 for page in pages], key=key)
            self.until(lambda n=number, t=target: 9100 + n in t.told)  # type: ignore[misc]  # a lambda's default
            self.until(lambda n=number, s=source: 9000 + n in s.told)  # type: ignore[misc]  # a lambda's default
            assert target.told[9100 + number].ok and source.told[9000 + number].ok
            assert target.pool.pages[41:61] == [content(page) for page in pages]


@contextlib.contextmanager
def peer_rig() -> Iterator[PeerRig]:
    rig = PeerRig()
    try:
        yield rig
    finally:
        for side in rig.sides:
            side.close()
