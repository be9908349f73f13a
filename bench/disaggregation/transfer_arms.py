"""Two workers' KV transfer agents, one of which pulls pages from the other with one transport, as an arm of the
transfer benchmark.

Both KV transfer agents are real: each has its AgentProcess, its process, its ring and its frames, and is driven by an
engine's loop. The loops run in two processes. *Alone*, pages already lie in the exporter's ring and stay in the
puller's ring; memcpy and TCP of the same number of bytes are comparable to this. *Whole*, engines also copy pages from
their pool into the ring and out of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bench.harness.plain_pages import ids
from bench.harness.process_cpu import cpu_s
from bench.kvstore.pages import NAMESPACE
from quire_common.config import ServiceConfig
from quire_common.credit import MoveKind, PageMove
from quire_common.credit.hello import RankAddress
from quire_common.kv_data.frame import DataConnectionError
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.agent_process import AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.peers.peer_access import PeerAccess
from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from quire_worker.kv_transfer.peers.tunnel_stream import TunnelDialer
from quire_worker.kv_transfer.setup import DEFAULT_BYTES, DEFAULT_SLOTS, AgentSetup
from quire_worker.kv_transfer.transports.data_link import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.kvstore.pages import Bodies, Pages
    from quire_worker.arrays import Int32
    from quire_worker.kv_transfer.copier import Copier
    from quire_worker.kv_transfer.ring import Ring

# A prompt of 4,096 tokens where a page has 64, as on a GPU.
PART = 64
_LIMIT_S = 60.0
_CONNECT_S = 0.5


class Pool:
    """A pool of an engine, with pages from 1 on."""

    def __init__(self, bodies: Bodies) -> None:
        self.bytes = np.concatenate([np.zeros_like(bodies[:1]), bodies])
        self.page_bytes = int(bodies.shape[1])

    def read_page(self, page: int, /) -> memoryview:
        return memoryview(self.bytes[page])

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        self.bytes[page] = np.frombuffer(data, np.uint8)


class NoCopier:
    """Implements Copier without copies, because pages are in the ring already and stay there."""

    def __init__(self, ring: Ring, body: bytes) -> None:
        self.wake: Callable[[], None] = lambda: None
        for slot in range(ring.slots):
            ring.slot(slot)[:] = body

    def to_ring(self, page: int, slot: int) -> None: ...

    def to_page(self, page: int, slot: int) -> None: ...

    def prepare_fetch(self) -> None: ...

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None: ...

    def record_event(self) -> int:
        return 0

    def is_complete(self, ticket: int) -> bool:
        return True

    def drain(self) -> None: ...

    def close(self) -> None: ...


class Engine:
    """The part of an engine that handles page moves."""

    def __init__(self, transport: str, page_bytes: int, copier: Callable[[Ring], Copier], memory: bytes = b"") -> None:
        """`memory`: the descriptor of its pool, if that is on a GPU."""
        slots = min(DEFAULT_SLOTS, DEFAULT_BYTES // page_bytes)
        self._listener = PeerListeners(WorkerConfig(model="", peer_transport=transport))
        setup = AgentSetup(
            "", NAMESPACE.hex(), "uint8", page_bytes, slots, log_level="warning", peers=True, peer_transport=transport,
            shares_memory=self._listener.advertise_memory(memory), peer_grpc=self._listener.grpc_listen,
            peer_hosts=self._listener.peer_hosts,
        )  # fmt: skip  # one line of settings
        self.addresses = self._listener.addresses
        self.transfer_agent = AgentProcess.start(setup, copier, inherited=self._listener.inherited_fds)
        self._woken = threading.Event()
        self.transfer_agent.wake = self._woken.set
        self._await_peers()

    def carry(self, moves: Sequence[PageMove], begun: Callable[[], None] = lambda: None) -> None:
        """Run the moves until all have ended well. Raises SystemExit if one fails. `begun` is called when all are
        submitted."""
        for move in moves:
            if not self.transfer_agent.submit(move):
                raise SystemExit("a move was refused")
            self.transfer_agent.offer_pages(move.id, len(move.device_page))
        begun()
        left = len(moves)
        while left:
            if not self._woken.wait(_LIMIT_S):
                raise SystemExit("nothing moves any more")
            self._woken.clear()
            results = self.transfer_agent.take_results()
            if not all(result.ok for result in results):
                raise SystemExit(f"a move failed: {results}")
            left -= len(results)

    def close(self) -> None:
        self.transfer_agent.close()
        self._listener.close()

    def _await_peers(self) -> None:
        """Until the process greets whoever comes in."""
        move = PageMove(0, MoveKind.PULL, 0, ids(), (), source=self.addresses)
        access = PeerAccess.from_move(move, PeerHosts(self._listener.peer_hosts))
        deadline = time.monotonic() + _LIMIT_S
        dial = TunnelDialer(ServiceConfig()) if access.grpc else connect
        address = access.grpc or access.tcp or access.socket
        while time.monotonic() < deadline:
            with contextlib.suppress(DataConnectionError, OSError):
                dial(address, _CONNECT_S).close()
                return
            self._woken.wait(_CONNECT_S)
            self.transfer_agent.take_results()
        raise SystemExit("the transfer agent does not start")


class PeerArm:
    """Runs one pull after another, each with the pages of a prompt."""

    def __init__(self, transport: str, pages: Pages, *, whole: bool = False) -> None:
        self._page_bytes, self._count = pages.page_bytes, len(pages.framed)
        self._pool = Pool(np.zeros_like(pages.bodies))
        copier = partial(HostCopier, self._pool) if whole else partial(NoCopier, body=bytes(self._page_bytes))
        self._engine = Engine(transport, self._page_bytes, copier)
        self._whole = whole
        command = [
            sys.executable,
            "-m",
            "bench.disaggregation.transfer_arms",
            transport,
            str(self._count),
            str(self._page_bytes),
        ]
        self._peer = subprocess.Popen(
            [*command, "whole" if whole else "alone"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = json.loads(self._hear())
        self._source = tuple(RankAddress(0, name, text.encode()) for name, text in hello["addresses"])
        transfer_agent = self._engine.transfer_agent.pid
        if transfer_agent is None:
            raise RuntimeError("the engine has no transfer agent")
        self._pids = (int(hello["pid"]), transfer_agent)
        self._cpu_s, self._pages = [0.0, 0.0], 0

    def get(self, pages: Pages) -> float:
        moves, keys = [], []
        for number, part in enumerate(pages.parts(PART)):
            keys.append(hashlib.sha256(f"{pages.name} {part.start}".encode()).digest())
            target, hashes = ids(*(1 + index for index in part)), pages.run.hashes[part.start : part.stop]
            moves.append(
                PageMove(number, MoveKind.PULL, 0, target, hashes, b"id", lease_key=keys[-1], source=self._source)
            )
        exports = [[move.hashes[0].hex(), key.hex()] for move, key in zip(moves, keys, strict=True)]
        self._say(json.dumps({"name": pages.name, "parts": exports}))
        if self._hear() != "ready":
            raise SystemExit("the peer does not export")
        before, begin = self._spent_s(), time.perf_counter()
        for move in moves:
            self._engine.carry([move])
        took_s = time.perf_counter() - begin
        if self._hear() != "done":
            raise SystemExit("the peer's exports did not end")
        self._cpu_s = [all_ + now - then for all_, now, then in zip(self._cpu_s, self._spent_s(), before, strict=True)]
        self._pages += self._count
        if self._whole and not np.array_equal(self._pool.bytes[1:], content(self._count, self._page_bytes)):
            raise SystemExit("pages came changed")
        return took_s

    def cpu_us_per_page(self) -> dict[str, int]:
        """Return the CPU time per page of the two processes that move pages."""
        exporter, puller = (round(spent * 1e6 / max(self._pages, 1)) for spent in self._cpu_s)
        return {"exporter": exporter, "puller": puller}

    def close(self) -> None:
        self._engine.close()
        self._peer.communicate(timeout=_LIMIT_S)

    def _say(self, line: str) -> None:
        if self._peer.stdin is not None:
            print(line, file=self._peer.stdin, flush=True)

    def _hear(self) -> str:
        return "" if self._peer.stdout is None else self._peer.stdout.readline().strip()

    def _spent_s(self) -> list[float]:
        return [cpu_s(pid) for pid in self._pids]


def content(count: int, page_bytes: int) -> Bodies:
    """Return the content of an exporter's pages."""
    return np.random.default_rng(1).integers(0, 256, (count, page_bytes), dtype=np.uint8)


def main() -> int:
    """Run the exporter: it prints the address of its pages and the pids of its processes, then exports the pages of
    each input line."""
    transport, count, page_bytes, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    bodies = content(count, page_bytes)
    copier = partial(HostCopier, Pool(bodies)) if how == "whole" else partial(NoCopier, body=bodies[0].tobytes())
    engine = Engine(transport, page_bytes, copier)
    addresses = [(address.transport, address.descriptor.decode()) for address in engine.addresses]
    print(json.dumps({"addresses": addresses, "pid": engine.transfer_agent.pid}), flush=True)
    for line in sys.stdin:
        asked, first, moves = json.loads(line), 0, []
        for number, (_, key) in enumerate(asked["parts"]):
            indices = range(first, min(first + PART, count))
            hashes = tuple(hashlib.sha256(f"{asked['name']} {index}".encode()).digest() for index in indices)
            pages = ids(*(1 + index for index in indices))
            moves.append(PageMove(number, MoveKind.EXPORT, 0, pages, hashes, b"id", lease_key=bytes.fromhex(key)))
            first += PART
        engine.carry(moves, lambda: print("ready", flush=True))
        print("done", flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
