"""A worker's moves through a real kvstore: pages stored by one worker are another's cached range. The KV transfer agent
is the real process; that it dies is a miss."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_common.kv.kv_client import KvClient, TransferCancelled
from quire_common.pages import PageRun, chain_hashes
from quire_common.sequence import RequestContext
from quire_common.telemetry.interceptors import sync_server_interceptors
from quire_common.transport import SERVER_OPTIONS
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.server import KvstoreService, worker_threads
from quire_worker.config import WorkerConfig
from quire_worker.engine.transfer_agent import MoveResult
from quire_worker.kv_transfer.agent_process import AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.setup import AgentSetup
from tests.fakes.worker.counting_runner import CountingRunner, continuation
from tests.fakes.worker.engine_bench import ROOMY, Told, a_start
from tests.fakes.worker.worker_server import VOCAB, FakeScheduler, WorkerServer, counting_info, counting_model
from tests.otlp_sink import OtlpSink

PROMPT = list(range(20, 33))  # three full pages of 4, and one token
HASHES = tuple(chain_hashes(PROMPT, 4))
RUN = PageRun(counting_info().pages.namespace, 0, HASHES)


@contextlib.contextmanager
def kvstore() -> Iterator[str]:
    config = KvstoreConfig(ram_bytes=1 << 20)
    service = KvstoreService(config)
    with futures.ThreadPoolExecutor(worker_threads(config)) as pool:
        server = grpc.server(pool, interceptors=sync_server_interceptors(), options=SERVER_OPTIONS)
        service.register(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        service.start()
        yield address
        server.stop(5).wait()
        service.store.check_integrity()
        service.close()


def a_worker(address: str, runner: CountingRunner | None = None) -> WorkerServer:
    config = WorkerConfig(model="counting", max_num_seqs=4, kvstore=address)
    return WorkerServer(lambda config, progress: counting_model(runner), config)


def moved(scheduler: FakeScheduler, told: Told, move_id: int) -> tuple[int, int]:
    while move_id not in told.moved:
        told.add(scheduler.next_report())
    return told.moved[move_id]


def finished(scheduler: FakeScheduler, told: Told, slot: int) -> list[int]:
    while slot not in told.finish:
        told.add(scheduler.next_report())
    return told.tokens[slot]


def store(address: str) -> None:
    """One worker computes the prompt and stores its pages."""
    with a_worker(address) as worker:
        scheduler, told = FakeScheduler(worker.stub), Told()
        scheduler.attach()
        scheduler.grant(start=[a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1)], budget=ROOMY)
        finished(scheduler, told, 0)
        scheduler.grant(move=[PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3), HASHES)])
        assert moved(scheduler, told, 1) == (0, 3)


def look_up(address: str) -> bytes:
    with grpc.insecure_channel(address) as channel:
        found = KvClient(channel).lookup(RUN)
    assert found.pages == 3
    return found.lease


def test_workers_share_pages_through_the_kvstore() -> None:
    with kvstore() as address:
        store(address)
        lease = look_up(address)
        runner = CountingRunner(64, 4, VOCAB)
        with a_worker(address, runner) as worker:
            scheduler, told = FakeScheduler(worker.stub), Told()
            scheduler.attach()
            scheduler.grant(
                start=[a_start(0, PROMPT, [11, 12, 13, 14, 15], cached=12)],
                move=[PageMove(7, MoveKind.LOAD, 0, ids(11, 12, 13), HASHES, lease)],
                budget=ROOMY,
            )
            assert moved(scheduler, told, 7) == (0, 3)
            assert finished(scheduler, told, 0) == continuation(PROMPT, 8, VOCAB)
            assert runner.batches[0].position.tolist() == [12]
            np.testing.assert_array_equal(runner.pages[[11, 12, 13]].ravel(), PROMPT[:12])


@pytest.mark.parametrize("lease", [b"", b"unknown"])
def test_missing_lease_is_a_miss_and_is_recomputed(lease: bytes) -> None:
    with kvstore() as address, a_worker(address) as worker:
        scheduler, told = FakeScheduler(worker.stub), Told()
        scheduler.attach()
        scheduler.grant(
            start=[a_start(0, PROMPT, [11, 12, 13, 14, 15], cached=12)],
            move=[PageMove(7, MoveKind.LOAD, 0, ids(11, 12, 13), HASHES, lease)],
            budget=ROOMY,
        )
        assert finished(scheduler, told, 0) == continuation(PROMPT, 8, VOCAB)
        assert told.moved == {7: (1, 0)} and told.errors == []


def agent_pid() -> int:
    """The process that carries this process's pages, once it is there."""
    mark = b"quire_worker.kv_transfer\0--parent\0%d\0" % os.getpid()
    clock = threading.Event()
    for _ in range(3000):
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        clock.wait(0.02)
    raise AssertionError("there is no transfer agent")


@pytest.mark.deep
def test_killed_agent_is_a_miss_and_later_loads_hit() -> None:
    with kvstore() as address:
        store(address)
        with a_worker(address) as worker:
            scheduler, told = FakeScheduler(worker.stub), Told()
            scheduler.attach()
            pid = agent_pid()
            os.kill(pid, signal.SIGSTOP)  # the move is on its way
            scheduler.grant(
                start=[a_start(0, PROMPT, [11, 12, 13, 14, 15], cached=12)],
                move=[PageMove(7, MoveKind.LOAD, 0, ids(11, 12, 13), HASHES, look_up(address))],
                budget=ROOMY,
            )
            os.kill(pid, signal.SIGKILL)
            assert finished(scheduler, told, 0) == continuation(PROMPT, 8, VOCAB)
            assert told.moved == {7: (1, 0)} and told.errors == []
            move_id = 8
            while told.moved.get(move_id) != (0, 3):  # until there is another KV transfer agent
                move_id += 1
                scheduler.grant(move=[PageMove(move_id, MoveKind.LOAD, 0, ids(21, 22, 23), HASHES, look_up(address))])
                moved(scheduler, told, move_id)
            assert told.errors == [] and worker.failed == []


class Pages:
    """A pool of one page."""

    page_bytes = 16

    def read_page(self, page: int, /) -> bytes:
        return bytes(range(16))

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        raise AssertionError("nothing is loaded")


@pytest.mark.deep
def test_a_move_is_a_span_of_its_request() -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    context = RequestContext("r1", traceparent=f"00-{trace}-{parent}-01")
    with OtlpSink() as sink, kvstore() as address:
        group = counting_info().pages.groups[0]
        setup = AgentSetup(
            address, RUN.namespace.hex(), group.dtype, 16, 2, instance="worker-7", otlp_traces_endpoint=sink.endpoint
        )
        transfer_agent, woken = AgentProcess.start(setup, partial(HostCopier, Pages())), threading.Event()
        transfer_agent.wake = woken.set
        assert transfer_agent.submit(PageMove(1, MoveKind.STORE, 0, ids(1), HASHES[:1], context=context))
        ended: list[MoveResult] = []
        while not ended:
            assert woken.wait(60)
            woken.clear()
            ended = transfer_agent.take_results()
        assert ended[0].ok
        transfer_agent.close()  # the last spans leave with it
        spans = sink.wait_for(lambda spans: any(span.name == "store_pages" for span in spans), timeout_s=60)
    (span,) = [span for span in spans if span.name == "store_pages"]
    assert (span.service, span.trace_id, span.parent_id) == ("quire-worker", trace, parent)
    # The calls to the kvstore too, but for the question how pages will travel, which is nobody's.
    assert {span.trace_id for span in spans if not span.name.endswith("/Stats")} == {trace}


@pytest.mark.parametrize("last", [0, 1])
def test_abandoned_put_leaves_nothing(last: int) -> None:
    with kvstore() as address, grpc.insecure_channel(address) as channel:
        client, asked = KvClient(channel, timeout_s=30.0), list[int]()

        def body(index: int) -> bytes:
            asked.append(index)
            if index == last:
                raise TransferCancelled
            return bytes(16)

        with pytest.raises(TransferCancelled):
            client.put_pages(RUN, "int32", 16, body, on_wanted=asked.extend)
        assert asked == [0, 1, 2, *range(last + 1)]
        assert client.lookup(RUN).pages == 0
        assert client.put_pages(RUN, "int32", 16, lambda index: bytes(16)).stored == 3


@pytest.mark.deep
def test_absent_kvstore_is_a_miss() -> None:
    with a_worker("127.0.0.1:1") as worker:
        scheduler, told = FakeScheduler(worker.stub), Told()
        scheduler.attach()
        scheduler.grant(
            start=[a_start(0, PROMPT, [11, 12, 13, 14, 15], cached=12), a_start(1, [5], [16, 17, 18])],
            move=[PageMove(7, MoveKind.LOAD, 0, ids(11, 12, 13), HASHES, b"lease")],
            budget=ROOMY,
        )
        assert finished(scheduler, told, 1) == continuation([5], 8, VOCAB)
        assert finished(scheduler, told, 0) == continuation(PROMPT, 8, VOCAB)
        scheduler.grant(move=[PageMove(8, MoveKind.STORE, 0, ids(11, 12, 13), HASHES)])
        assert moved(scheduler, told, 8) == (1, 0)
