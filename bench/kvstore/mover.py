"""Compares two ways of moving pages between an engine's pool and a kvstore process: the KV transfer agent's process,
and threads in the engine.

`python -m bench.kvstore.mover --pages 256 --page-kib 64 2048` prints JSON. For both arms it has:

- MB/s of stores and loads while the model thread is idle, and while it runs steps of Python work (`--step-ms` each)
- the factor by which moves make such a step longer
- CPU time of the engine process per page
- how long the model thread waits at a step boundary (`stall_us`)

Arms alternate, and figures are medians over rounds. The three processes need a core each; on a loaded machine the
figures mean little.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import numpy as np

from bench.harness.processes import Service
from bench.kvstore.thread_mover import ThreadAgent
from quire_common.credit import MoveKind, PageMove
from quire_common.kv.kv_client import KvClient
from quire_common.pages import PageRun
from quire_worker.engine.transfer_agent import KvTransferAgent
from quire_worker.kv_transfer.agent_process import AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.setup import DEFAULT_SLOTS, AgentSetup
from quire_worker.kv_transfer.transports.registry import Traffic, choices
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector
from quire_worker.server import SWITCH_INTERVAL_S

NAMESPACE = b"n" * 32
ARMS = ("threads", "process")
LEASE_MS = 120_000
LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=256, help="pages of one round")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--pages-per-move", type=int, default=32)
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS, help="slots of the ring")
    parser.add_argument(
        "--kv-transport", choices=choices(Traffic.STORE), default="auto", help="the process's; threads have gRPC"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=5.0, help="Python work of the model thread per boundary")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with kvstore(4 * options.pages * max(options.page_kib) << 10) as address:
        sizes = {f"{kib}KiB": measure(address, kib << 10, options) for kib in options.page_kib}
    print(json.dumps({**vars(options), "sizes": sizes}))
    return 0


def measure(address: str, page_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    pool = Pool(2 * options.pages + 1, page_bytes)
    spin = calibrated(options.step_ms / 1e3)
    figures: dict[str, dict[str, list[float]]] = {}
    with grpc.insecure_channel(address) as channel:
        client = KvClient(channel, LIMIT_S)
        transfer_agents = {arm: make(arm, address, client, pool, page_bytes, options) for arm in ARMS}
        try:
            for round_ in range(-1, options.rounds):  # the first one warms up
                for busy in (False, True):
                    for arm in ARMS if round_ % 2 else ARMS[::-1]:
                        for name, value in one_round(
                            transfer_agents[arm], client, pool, options, spin if busy else 0
                        ).items():
                            if round_ >= 0:
                                figures.setdefault(arm, {}).setdefault(name, []).append(value)
        finally:
            for transfer_agent in transfer_agents.values():
                transfer_agent.close()
    return {
        arm: {name: round(statistics.median(values), 2) for name, values in of.items()} for arm, of in figures.items()
    }


def one_round(
    transfer_agent: KvTransferAgent, client: KvClient, pool: Pool, options: argparse.Namespace, spin: int
) -> dict[str, float]:
    """Store all pages under new names, load them into the other half, and compare them."""
    names = [hashlib.sha256(f"{time.time_ns()} {page}".encode()).digest() for page in range(options.pages)]
    runs = [tuple(names[i : i + options.pages_per_move]) for i in range(0, options.pages, options.pages_per_move)]
    pool.refresh(options.pages)
    leases, found = [b""] * len(runs), {}
    for kind in (MoveKind.STORE, MoveKind.LOAD):
        if kind == MoveKind.LOAD:
            leases = [client.lookup(PageRun(NAMESPACE, 0, run), lease_ms=LEASE_MS).lease for run in runs]
        first = 1 + (options.pages if kind == MoveKind.LOAD else 0)
        moves, place = [], first
        for number, run in enumerate(runs):
            pages = np.arange(place, place + len(run), dtype=np.int32)
            moves.append(PageMove(number, kind, 0, pages, run, leases[number]))
            place += len(run)
        cpu_s = time.process_time()
        measured = Driver(transfer_agent, spin).carry(moves)
        cpu_s = time.process_time() - cpu_s
        label = f"{kind.name.lower()}{'_busy' if spin else ''}"
        found[f"{label}_mb_s"] = options.pages * pool.page_bytes / 1e6 / measured.wall_s
        if measured.stalls_us:
            found[f"{label}_stall_us_median"] = statistics.median(measured.stalls_us)
            found[f"{label}_stall_cpu_us_max"] = max(measured.stalls_cpu_us)
        if not spin:
            found[f"{label}_engine_cpu_us_per_page"] = cpu_s / options.pages * 1e6
        else:
            found[f"{label}_step_factor"] = statistics.mean(measured.steps_s) / (options.step_ms / 1e3)
    if not (pool.bytes[1 : options.pages + 1] == pool.bytes[options.pages + 1 :]).all():
        raise SystemExit("pages came back changed")
    client.release(*leases)
    return found


@dataclass
class Measured:
    wall_s: float = 0.0
    stalls_us: list[float] = field(default_factory=list)
    stalls_cpu_us: list[float] = field(default_factory=list)
    """Of the model thread alone: what others do on its core does not count."""
    steps_s: list[float] = field(default_factory=list)


class Driver:
    """The model thread. If there is work, it runs a step of it and then a boundary; otherwise it waits to be woken."""

    def __init__(self, transfer_agent: KvTransferAgent, spin: int) -> None:
        self._transfer_agent = transfer_agent
        self._spin = spin
        self._woken = threading.Event()
        transfer_agent.wake = self._woken.set

    def carry(self, moves: list[PageMove]) -> Measured:
        measured, ended = Measured(), 0
        begin = time.perf_counter()
        for move in moves:
            if not self._transfer_agent.submit(move):
                raise SystemExit("a move was refused")
        while ended < len(moves):
            if self._spin:
                started = time.perf_counter()
                work(self._spin)
                measured.steps_s.append(time.perf_counter() - started)
            elif not self._woken.wait(LIMIT_S):
                raise SystemExit("nothing moves any more")
            self._woken.clear()
            started, started_cpu = time.perf_counter(), time.thread_time()
            results = self._transfer_agent.take_results()
            measured.stalls_cpu_us.append((time.thread_time() - started_cpu) * 1e6)
            measured.stalls_us.append((time.perf_counter() - started) * 1e6)
            if not all(result.ok for result in results):
                raise SystemExit(f"a move failed: {results}")
            ended += len(results)
        measured.wall_s = time.perf_counter() - begin
        return measured


class Pool:
    """A pool of random bytes, with pages from 1 on."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.bytes = np.random.default_rng(0).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)

    def read_page(self, page: int, /) -> memoryview:
        return memoryview(self.bytes[page])

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        self.bytes[page] = np.frombuffer(data, np.uint8)

    def refresh(self, pages: int) -> None:
        """Give all pages new content, so that content of an earlier round cannot be mistaken for this round's."""
        self.bytes[1 : pages + 1] += 1


def make(
    arm: str, address: str, client: KvClient, pool: Pool, page_bytes: int, options: argparse.Namespace
) -> KvTransferAgent:
    if arm == "threads":
        transports = TransportSelector.from_name("grpc", address, client)
        return ThreadAgent(KvStoreConnector(client, transports, NAMESPACE, "uint8", page_bytes), pool)
    setup = AgentSetup(
        address,
        NAMESPACE.hex(),
        "uint8",
        page_bytes,
        options.slots,
        log_format="pretty",
        kv_transport=options.kv_transport,
    )
    return AgentProcess.start(setup, partial(HostCopier, pool))


def work(count: int) -> int:
    total = 0
    for number in range(count):
        total += number & 7
    return total


def calibrated(step_s: float) -> int:
    """Return how much work takes this long without moves."""
    best = min(_timed(200_000) for _ in range(10))
    return max(1, int(200_000 * step_s / best))


def _timed(count: int) -> float:
    begin = time.perf_counter()
    work(count)
    return time.perf_counter() - begin


@contextmanager
def kvstore(ram_bytes: int, *flags: str) -> Iterator[str]:
    """Run a kvstore, and yield its address. At the end, print its warnings and errors."""
    with Service("kvstore", f"--ram-bytes={ram_bytes}", *flags) as service:
        try:
            yield service.ready()
        finally:
            service.stop()
            for line in service.complaints():
                print(json.dumps(line), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
