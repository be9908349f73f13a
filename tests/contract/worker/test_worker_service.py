"""The Worker contract over a real stream, with a counting model behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from quire.v1 import worker_pb2
from quire_common.columns import pack_i32
from quire_common.credit import Budget, Epoch, Report
from quire_common.errors import ConfigError, QuireError, from_message, from_rpc_error
from quire_common.telemetry.metrics import registry
from quire_worker import run_stream
from quire_worker.config import WorkerConfig
from quire_worker.replica import ServedModel
from tests.fakes.worker.counting_runner import CountingRunner, continuation
from tests.fakes.worker.engine_bench import LOCKSTEP, ROOMY, Told, a_start
from tests.fakes.worker.worker_server import VOCAB, WAIT_S, FakeScheduler, Progress, WorkerServer, counting_model

PROMPT = [5, 6, 7, 8, 9]
PAGES = [1, 2, 3, 4]


@pytest.fixture
def worker() -> Iterator[WorkerServer]:
    with WorkerServer() as server:
        yield server
        server.service.drain(0)
        assert server.failed == []


def says(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, count, VOCAB)


def collect(scheduler: FakeScheduler, until: int) -> Told:
    """Reports until so many sequences have finished."""
    told = Told()
    while len(told.finish) < until:
        told.add(scheduler.next_report())
    return told


def error_of(scheduler: FakeScheduler) -> QuireError:
    """What ends the stream."""
    with pytest.raises(grpc.RpcError) as caught:
        while True:
            next(scheduler.call)
    return from_rpc_error(caught.value)


def gone(worker: WorkerServer, run: int) -> None:
    """Wait until the worker is in this run, with empty slots."""
    poll = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        status = worker.stub.GetStatus(worker_pb2.GetStatusRequest())
        if status.epoch.run == run and status.running == 0:
            assert not status.attached
            return
        poll.wait(0.01)
    raise AssertionError(f"still {status}")


def test_granted_sequence_runs_without_further_grants(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    hello = scheduler.attach()
    assert (hello.num_slots, hello.max_num_seqs, hello.num_pages) == (10, 4, (64,))
    assert hello.epoch.run == 1 and hello.model.name == "counting" and hello.capabilities == ("cpu",)
    assert worker.stub.GetStatus(worker_pb2.GetStatusRequest()).attached
    scheduler.grant(start=[a_start(0, PROMPT, PAGES)], budget=ROOMY)
    told = collect(scheduler, 1)
    assert told.tokens[0] == says(8)
    steps = [applied for report in told.reports for applied in report.step_applied.tolist()]
    assert steps == [1] * 8
    assert next(report.first_step for report in told.reports if report.steps) == 1
    assert all(report.grant_arrival_us > 0 for report in told.reports)
    assert len([timing for report in told.reports for timing in report.timing]) == 8


def test_every_grant_is_acknowledged_when_idle(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    for seq in (1, 2, 3):
        scheduler.grant()
        report = scheduler.next_report()
        assert (report.retired, report.steps) == (seq, 0)


def test_lockstep_is_one_step_and_one_report_per_grant(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.grant(start=[a_start(0, PROMPT, PAGES)], budget=LOCKSTEP)
    tokens: list[int] = []
    for seq in range(1, 9):
        report = scheduler.next_report()
        assert report.step_applied.tolist() == [seq] and report.retired == seq
        tokens += report.token.tolist()
        scheduler.grant()
    assert tokens == says(8)


def test_more_sequences_than_rows_all_finish(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    prompts = {slot: [slot + 3] * (slot + 1) for slot in range(10)}
    starts = [a_start(s, p, [1 + 5 * s, 2 + 5 * s, 3 + 5 * s, 4 + 5 * s, 5 + 5 * s], key=s) for s, p in prompts.items()]
    scheduler.grant(start=starts, budget=Budget(7, 4, 3, 1))
    assert collect(scheduler, 10).tokens == {s: says(8, p) for s, p in prompts.items()}


def test_one_bad_sequence_fails_alone() -> None:
    runner = CountingRunner(64, 4, VOCAB, poison=66)
    with WorkerServer(lambda config, progress: counting_model(runner)) as worker:
        scheduler = FakeScheduler(worker.stub)
        scheduler.attach()
        scheduler.grant(
            start=[a_start(0, PROMPT, PAGES), a_start(1, [1, 66], [5, 6, 7]), a_start(2, [999], [8, 9])], budget=ROOMY
        )
        told = collect(scheduler, 2)
        assert told.tokens[0] == says(8)
        assert dict(told.codes()) == {1: "STEP_FAILED", 2: "TOKEN_OUT_OF_RANGE"}


@pytest.mark.parametrize("way", ["cancel", "half_close"])
def test_slots_of_a_disconnected_scheduler_are_freed(worker: WorkerServer, way: str) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.grant(start=[a_start(0, PROMPT, PAGES)], budget=LOCKSTEP)
    assert scheduler.next_report().running == 1
    getattr(scheduler, way)()
    gone(worker, run=2)
    after = FakeScheduler(worker.stub)
    assert after.attach().epoch == Epoch(scheduler.hello.epoch.boot_id, 2)
    after.grant(start=[a_start(0, [7], [1, 2, 3])], budget=ROOMY)
    assert collect(after, 1).tokens == {0: says(8, [7])}


def test_newest_scheduler_takes_the_worker_over(worker: WorkerServer) -> None:
    old = FakeScheduler(worker.stub)
    old.attach()
    old.grant(start=[a_start(0, PROMPT, PAGES)], budget=LOCKSTEP)
    old.next_report()
    new = FakeScheduler(worker.stub)
    assert new.attach().epoch.run == 2
    assert error_of(old).code == "SCHEDULER_REPLACED"
    new.grant(start=[a_start(0, [7], [1, 2, 3])], budget=ROOMY)
    assert collect(new, 1).tokens == {0: says(8, [7])}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (worker_pb2.Grant(seq=1), "EPOCH_MISMATCH"),
        (worker_pb2.Grant(stop_slot=b"123"), "BAD_COLUMN"),
        (worker_pb2.Grant(limit_slot=pack_i32([1])), "UNEQUAL_COLUMNS"),
        (worker_pb2.Grant(control=[worker_pb2.Control()]), "PARAMETER_UNSUPPORTED"),
    ],
)
def test_refused_grant_ends_the_stream(worker: WorkerServer, message: worker_pb2.Grant, code: str) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.send_raw(message)
    assert error_of(scheduler).code == code
    again = FakeScheduler(worker.stub)
    assert again.attach().epoch.run == 2


def test_a_grant_out_of_order_ends_the_stream(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.seq = 5
    scheduler.grant()
    assert error_of(scheduler).code == "GRANT_OUT_OF_ORDER"


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (worker_pb2.Grant(seq=1), "HELLO_MISSING"),
        (worker_pb2.Grant(hello=worker_pb2.Hello(protocol_version=99)), "PROTOCOL_VERSION"),
    ],
)
def test_the_first_frame_is_a_hello_of_this_version(worker: WorkerServer, hello: worker_pb2.Grant, code: str) -> None:
    assert error_of(FakeScheduler(worker.stub, hello)).code == code


def test_silent_streams_hold_no_threads(worker: WorkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stream, "HELLO_LIMIT_S", 0.2)
    silent, entered, greet = threading.Event(), threading.Semaphore(0), run_stream.RunStream._greet

    def counted(stream: run_stream.RunStream) -> None:
        entered.release()
        greet(stream)

    def say_nothing() -> Iterator[worker_pb2.Grant]:
        silent.wait()
        yield from ()

    monkeypatch.setattr(run_stream.RunStream, "_greet", counted)
    calls = [worker.stub.Run(say_nothing()) for _ in range(8)]
    try:
        assert all(entered.acquire(timeout=WAIT_S) for _ in calls), "all threads are held"
        assert worker.stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S).phase == "ready"
    finally:
        silent.set()
        for call in calls:
            call.cancel()


def test_load_progress_reaches_every_watcher_and_run_waits() -> None:
    go, told = threading.Event(), threading.Event()

    def slow(config: WorkerConfig, progress: Progress) -> ServedModel:
        progress("weights", 5, 10)
        told.set()
        assert go.wait(WAIT_S)
        return counting_model()

    with WorkerServer(slow, start=False) as worker:
        starting = threading.Thread(target=worker.service.start)
        starting.start()
        assert told.wait(WAIT_S)
        watchers = [worker.stub.Load(worker_pb2.LoadRequest(model="counting"), timeout=WAIT_S) for _ in range(3)]
        for watcher in watchers:
            first = next(watcher)
            assert (first.phase, first.done_bytes, first.total_bytes) == ("weights", 5, 10)
        assert error_of(FakeScheduler(worker.stub)).code == "MODEL_LOADING"
        assert worker.stub.GetStatus(worker_pb2.GetStatusRequest()).phase == "weights"
        go.set()
        for watcher in watchers:
            last = list(watcher)[-1]
            assert last.phase == "ready" and last.model.name == "counting"
        starting.join()
        assert FakeScheduler(worker.stub).attach().epoch.run == 1


def test_a_failed_load_is_told_to_watchers() -> None:
    def broken(config: WorkerConfig, progress: Progress) -> ServedModel:
        progress("config", 0, 0)
        raise ConfigError("MISSING_CONFIG", "There is no config.json.", "Download it.")

    with WorkerServer(broken, start=False) as worker:
        with pytest.raises(ConfigError):
            worker.service.start()
        last = list(worker.stub.Load(worker_pb2.LoadRequest(), timeout=WAIT_S))[-1]
        assert last.phase == "config" and from_message(last.error).code == "MISSING_CONFIG"
        assert error_of(FakeScheduler(worker.stub)).code == "MISSING_CONFIG"


def test_an_error_after_the_load_is_told_to_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(prefix: str, model: str) -> None:
        raise OSError("the metrics cannot be shown")

    monkeypatch.setattr(registry, "name_model", fails)
    with WorkerServer(start=False) as worker:
        with pytest.raises(OSError, match="cannot be shown"):
            worker.service.start()
        last = list(worker.stub.Load(worker_pb2.LoadRequest(), timeout=WAIT_S))[-1]
        assert from_message(last.error).code == "INTERNAL"


def test_load_of_another_model_is_not_found(worker: WorkerServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.stub.Load(worker_pb2.LoadRequest(model="other"), timeout=WAIT_S))
    assert from_rpc_error(caught.value).code == "MODEL_NOT_SERVED"


def test_draining_lets_sequences_end_and_takes_no_new_scheduler(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.grant(start=[a_start(0, PROMPT, PAGES)], budget=LOCKSTEP)
    scheduler.next_report()
    worker.service.drain(0.01)
    assert scheduler.next_report().draining
    assert error_of(FakeScheduler(worker.stub)).code == "DRAINING"
    scheduler.grant(budget=ROOMY)
    worker.service.drain(WAIT_S)
    told = collect(scheduler, 1)
    assert told.tokens[0] == says(8)[1:] and all(report.draining for report in told.reports)


def test_idle_run_stream_has_heartbeats(worker: WorkerServer) -> None:
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()
    scheduler.grant()
    assert scheduler.next_report().retired == 1
    for _ in range(2):
        beat = scheduler.next_frame()
        assert (beat.heartbeat, beat.retired, beat.steps) == (True, 1, 0)


def test_lockstep_worker_matches_with_no_step_in_flight() -> None:
    prompts = {slot: [slot + 3] * (slot + 1) for slot in range(10)}
    starts = [a_start(s, p, [1 + 5 * s, 2 + 5 * s, 3 + 5 * s, 4 + 5 * s, 5 + 5 * s], key=s) for s, p in prompts.items()]
    told = {}
    for lockstep in (True, False):
        config = WorkerConfig(model="counting", max_num_seqs=4, lockstep=lockstep)
        with WorkerServer(config=config) as worker:
            scheduler = FakeScheduler(worker.stub)
            scheduler.attach()
            scheduler.grant(start=starts, budget=Budget(7, 4, 3, 1))
            told[lockstep] = collect(scheduler, 10)
    assert told[True].tokens == told[False].tokens == {s: says(8, p) for s, p in prompts.items()}
    assert all(report.in_flight == 0 for report in told[True].reports)
    assert any(report.in_flight == 1 for report in told[False].reports)


def test_broken_engine_ends_its_run_and_serves_the_next(worker: WorkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = worker.service._replica
    assert replica is not None
    scheduler = FakeScheduler(worker.stub)
    scheduler.attach()

    def broken() -> Report | None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(replica.engine, "collect", broken)
        scheduler.grant()
        assert error_of(scheduler).code == "INTERNAL"
    assert FakeScheduler(worker.stub).attach().epoch.run == 2
