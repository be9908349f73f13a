"""The model thread without gRPC: who is served, who is told what, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Epoch, Grant, MoveKind, PageMove, Report, WorkerHello
from quire_common.errors import FailedPrecondition, Internal, QuireError, Unavailable
from quire_worker.engine import step_runner
from quire_worker.engine.device import ThreadDevice
from quire_worker.engine.engine import Engine
from quire_worker.engine.run.run_loop import RunLoop
from quire_worker.engine.run.session import Session
from quire_worker.engine.spec import EngineSpec
from quire_worker.step import StepBatch, StepOutput
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.counting_runner import CountingRunner, continuation
from tests.fakes.worker.engine_bench import ROOMY, Told, a_start, small_spec
from tests.fakes.worker.worker_server import counting_info

WAIT_S = 30.0


class GatedRunner(CountingRunner):
    """Steps wait at the gate, once it was shut."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.num_pages, spec.page_size, spec.vocab_size)
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)

    def run(self, batch: StepBatch) -> StepOutput:
        self.inside.release()
        assert self.gate.wait(WAIT_S)
        return super().run(batch)


class LoopBench:
    def __init__(self, step_timeout_s: float = 120.0, *, starts: bool = True) -> None:
        spec = small_spec()
        self.runner = GatedRunner(spec)
        self.transfer_agent = FakeTransferAgent()
        self.device = ThreadDevice(self.runner, step_timeout_s)
        self.engine = Engine(spec, self.device, self.transfer_agent)
        self.fatal: list[QuireError] = []
        self.loop = RunLoop(self.engine, self.hello, self.fatal.append)
        self.device.wake = self.loop.wake
        if starts:
            self.loop.start()

    def hello(self, epoch: Epoch) -> WorkerHello:
        return WorkerHello(epoch, 10, 4, (64,), counting_info())

    def attach(self) -> tuple[Session, Epoch, Iterator[WorkerHello | Report]]:
        session = self.loop.attach()
        frames = session.frames()
        hello = next(frames)
        assert isinstance(hello, WorkerHello)
        return session, hello.epoch, frames

    def attach_and_hang(self) -> tuple[Session, Iterator[WorkerHello | Report]]:
        """Attach, and grant a sequence whose first step waits at the gate."""
        session, epoch, frames = self.attach()
        self.runner.gate.clear()
        self.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3])], budget=ROOMY), 0)
        assert self.runner.inside.acquire(timeout=WAIT_S)
        return session, frames


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[LoopBench]:
    """Its parameter, if it has one, is the longest time of a step."""
    made = LoopBench(getattr(request, "param", 120.0))
    yield made
    made.loop.close()
    made.device.close()
    assert made.fatal == []
    made.engine.check_integrity()


def read_until(frames: Iterator[WorkerHello | Report], finished: int) -> Told:
    told = Told()
    for frame in frames:
        assert isinstance(frame, Report)
        told.add(frame)
        if len(told.finish) == finished:
            return told
    raise AssertionError("the stream ended")


def next_report(frames: Iterator[WorkerHello | Report], heartbeat: bool = False) -> Report:
    """The next Report, or the next heartbeat."""
    for frame in frames:
        assert isinstance(frame, Report)
        if frame.heartbeat == heartbeat:
            return frame
    raise AssertionError("the stream ended")


def a_bug(*_: object) -> None:
    raise ValueError("a bug")


def test_grants_of_a_replaced_session_are_dropped(bench: LoopBench) -> None:
    old, epoch, old_frames = bench.attach()
    new, new_epoch, frames = bench.attach()
    assert new_epoch == Epoch(epoch.boot_id, epoch.run + 1)
    bench.loop.granted(old, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3])], budget=ROOMY), 0)
    bench.loop.detach(old)
    bench.loop.granted(new, Grant(new_epoch, 1, start=[a_start(1, [2], [1, 2, 3])], budget=ROOMY), 0)
    assert read_until(frames, 1).tokens == {1: continuation([2], 8, 97)}
    with pytest.raises(FailedPrecondition, match="SCHEDULER_REPLACED"):
        list(old_frames)


def test_a_finished_move_wakes_the_model_thread(bench: LoopBench) -> None:
    session, epoch, frames = bench.attach()
    move = PageMove(3, MoveKind.LOAD, 0, ids(1), (b"h" * 32,))
    start = a_start(0, [9, 9, 9, 9, 9], [1, 2, 3, 4], cached=4)
    bench.loop.granted(session, Grant(epoch, 1, start=[start], move=[move], budget=ROOMY), 0)
    assert next_report(frames).steps == 0
    bench.runner.pages[1] = 9
    bench.transfer_agent.end(3)
    bench.loop.wake()
    told = read_until(frames, 1)
    assert told.moved == {3: (0, 1)} and told.tokens == {0: continuation([9] * 5, 8, 97)}


def test_vacancy_is_known(bench: LoopBench) -> None:
    session, epoch, frames = bench.attach()
    assert bench.loop.wait_vacant(0)
    bench.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3], limit=2)], budget=ROOMY), 0)
    next_report(frames)
    assert not bench.loop.wait_vacant(0.01)
    bench.loop.granted(session, Grant(epoch, 2, limit_slot=ids(0), limit_position=ids(64)), 0)
    assert bench.loop.wait_vacant(WAIT_S)
    bench.loop.granted(session, Grant(epoch, 3, start=[a_start(0, [1], [1, 2, 3], limit=2)]), 0)
    read_until(frames, 1)
    bench.loop.detach(session)
    assert bench.loop.wait_vacant(WAIT_S)


def test_signs_of_life_come_while_a_long_step_runs(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.engine.run.session.HEARTBEAT_S", 0.05)
    session, epoch, frames = bench.attach()
    bench.loop.granted(session, Grant(epoch, 1, budget=ROOMY), 0)
    assert next_report(frames).retired == 1
    bench.runner.gate.clear()
    bench.loop.granted(session, Grant(epoch, 2, start=[a_start(0, [1], [1, 2, 3])]), 0)
    assert bench.runner.inside.acquire(timeout=WAIT_S)
    for _ in range(3):
        beat = next_report(frames, heartbeat=True)
        assert (beat.retired, beat.steps, beat.draining) == (1, 0, False)
    bench.runner.gate.set()
    assert read_until(frames, 1).tokens == {0: continuation([1], 8, 97)}


def test_grants_are_applied_while_a_step_runs(bench: LoopBench) -> None:
    session, epoch, frames = bench.attach()
    bench.runner.gate.clear()
    bench.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3], limit=2)], budget=ROOMY), 0)
    assert bench.runner.inside.acquire(timeout=WAIT_S)
    bench.loop.granted(session, Grant(epoch, 2, start=[a_start(1, [2], [4, 5, 6])], stop_slot=ids(0)), 0)
    while bench.engine.residents.holds(0):
        bench.loop.wake()
    bench.runner.gate.set()
    told = read_until(frames, 1)
    assert told.tokens == {0: continuation([1], 2, 97), 1: continuation([2], 8, 97)}
    applied = [seq for report in told.reports for seq in report.step_applied.tolist()]
    assert applied[:2] == [1, 1] and set(applied[2:]) == {2}


def test_a_scheduler_that_attaches_waits_for_the_steps_of_the_one_before(bench: LoopBench) -> None:
    bench.attach_and_hang()
    following = bench.loop.attach()
    assert following.outgoing.empty()
    assert bench.loop.attached, "the one before must not take it back meanwhile"
    bench.runner.gate.set()
    hello = next(following.frames())
    assert isinstance(hello, WorkerHello) and hello.epoch.run == 2
    assert bench.engine.in_flight == 0


def test_who_leaves_while_a_step_hangs_is_not_kept_waiting(bench: LoopBench) -> None:
    session, frames = bench.attach_and_hang()
    bench.loop.detach(session)
    assert all(frame.heartbeat for frame in frames if isinstance(frame, Report))
    following = bench.loop.attach()
    bench.loop.detach(following)
    assert list(following.frames()) == []
    assert not bench.loop.attached
    bench.runner.gate.set()


def test_session_that_ends_before_it_is_attached_replaces_no_scheduler(bench: LoopBench) -> None:
    bench.attach_and_hang()
    served, left = bench.loop.attach(), bench.loop.attach()  # both wait for the step that hangs
    bench.loop.detach(left)
    assert bench.loop.attached, "the one before the last still waits to be attached"
    bench.runner.gate.set()
    frames = served.frames()
    hello = next(frames)
    assert isinstance(hello, WorkerHello) and hello.epoch.run == 2
    bench.loop.granted(served, Grant(hello.epoch, 1, start=[a_start(0, [2], [1, 2, 3])], budget=ROOMY), 0)
    assert read_until(frames, 1).tokens == {0: continuation([2], 8, 97)}
    assert list(left.frames()) == []
    bench.loop.detach(served)
    assert not bench.loop.attached


@pytest.mark.parametrize("bench", [0.2], indirect=True)
def test_a_step_that_hangs_ends_the_worker_and_not_only_its_run(bench: LoopBench) -> None:
    session, _ = bench.attach_and_hang()
    bench.loop.detach(session)
    following = bench.loop.attach()
    with pytest.raises(Unavailable, match="stopped"):
        list(following.frames())
    assert [error.code for error in bench.fatal] == ["DEVICE_HUNG"]
    bench.fatal.clear()  # else the bench takes it for an accident
    bench.runner.gate.set()


@pytest.mark.parametrize("part", ["_by_sequence", "keep_tokens"])
def test_a_device_that_fails_outside_the_model_ends_the_worker_at_once(
    bench: LoopBench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(step_runner, part, a_bug)
    session, epoch, frames = bench.attach()
    bench.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3])], budget=ROOMY), 0)
    bench.loop._thread.join(WAIT_S)
    assert not bench.loop._thread.is_alive()
    with pytest.raises(Internal, match="DEVICE_BROKEN"):
        read_until(frames, 1)
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        next(bench.loop.attach().frames())
    assert [error.code for error in bench.fatal] == ["DEVICE_BROKEN"]
    bench.fatal.clear()  # else the bench takes it for an accident


def test_who_drains_a_device_that_breaks_meanwhile_is_told(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner, "keep_tokens", a_bug)
    session, _ = bench.attach_and_hang()
    bench.loop.detach(session)
    following = bench.loop.attach()
    bench.runner.gate.set()
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        list(following.frames())
    assert [error.code for error in bench.fatal] == ["DEVICE_BROKEN"]
    bench.fatal.clear()


def test_a_drain_is_told_at_once_and_what_is_held_runs_to_its_end(bench: LoopBench) -> None:
    _, frames = bench.attach_and_hang()
    bench.loop.drain()
    told = next_report(frames)
    assert (told.draining, told.steps, told.retired) == (True, 0, 1)
    assert next_report(frames, heartbeat=True).draining
    assert not bench.loop.wait_vacant(0)
    bench.runner.gate.set()
    rest = read_until(frames, 1)
    assert rest.tokens == {0: continuation([1], 8, 97)} and all(report.draining for report in rest.reports)
    assert bench.loop.wait_vacant(WAIT_S)


def test_a_scheduler_that_does_not_read_loses_its_session(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.engine.run.session.MAX_REPORTS_WAITING", 3)
    session, epoch, frames = bench.attach()
    seq, pause = 0, threading.Event()
    while bench.engine.epoch == epoch:
        seq += 1
        bench.loop.granted(session, Grant(epoch, seq), 0)
        pause.wait(0.001)
    with pytest.raises(Unavailable, match="SCHEDULER_TOO_SLOW"):
        list(frames)
    assert bench.attach()[1].run == epoch.run + 1


def test_close_ends_the_session_and_refuses_the_next(bench: LoopBench) -> None:
    _, _, frames = bench.attach()
    bench.loop.close()
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        next_report(frames)
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        next(bench.loop.attach().frames())
    bench.loop.close()


def test_a_thread_that_fails_says_so_and_leaves_nobody_waiting() -> None:
    bench = LoopBench()
    failed = threading.Event()
    bench.loop._on_fatal = lambda error: (bench.fatal.append(error), failed.set())  # type: ignore[assignment,func-returns-value]  # a pair of calls

    def broken() -> Epoch:
        raise RuntimeError("a bug")

    session, epoch, frames = bench.attach()
    bench.engine.begin_run = broken  # type: ignore[method-assign]  # a bug where there is no way back
    bench.loop.detach(session)
    assert failed.wait(WAIT_S)
    assert [error.code for error in bench.fatal] == ["INTERNAL"]
    assert list(frames) == []
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        next(bench.loop.attach().frames())
    assert epoch.run == 1


def test_session_is_closed_if_the_run_that_it_replaces_cannot_end() -> None:
    bench = LoopBench()

    def broken() -> Epoch:
        raise RuntimeError("a device that hangs")

    _, _, frames = bench.attach()
    bench.engine.begin_run = broken  # type: ignore[method-assign]  # as with a device that hangs
    newer = bench.loop.attach()
    with pytest.raises(FailedPrecondition, match="SCHEDULER_REPLACED"):
        list(frames)
    with pytest.raises(Unavailable, match="WORKER_STOPPED"):
        list(newer.frames())
    assert [error.code for error in bench.fatal] == ["INTERNAL"]
    bench.loop.close()
    bench.device.close()


def test_session_that_came_before_the_start_is_closed_if_the_start_fails() -> None:
    bench = LoopBench(starts=False)
    session = bench.loop.attach()
    bench.loop.close()
    for refused in (session, bench.loop.attach()):
        with pytest.raises(Unavailable, match="WORKER_STOPPED"):
            next(refused.frames())
    bench.device.close()


def test_what_a_device_put_off_is_done_while_nothing_runs(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[int] = []
    enough = threading.Event()

    def prepare(_: ThreadDevice) -> bool:
        busy.append(bench.engine.in_flight)
        if len(busy) == 3:
            enough.set()
        return len(busy) < 3

    monkeypatch.setattr(ThreadDevice, "prepare", prepare)
    bench.loop.wake()  # the thread may wait already
    assert enough.wait(WAIT_S)
    session, epoch, frames = bench.attach()
    bench.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3])], budget=ROOMY), 0)
    assert read_until(frames, 1).tokens == {0: continuation([1], 8, 97)}
    assert set(busy) == {0}


def test_what_a_device_put_off_is_done_without_a_pause_and_again_after_more_work(
    bench: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, done = [500], threading.Event()

    def prepare(_: ThreadDevice) -> bool:
        left[0] -= 1
        if left[0] <= 0:
            done.set()
        return left[0] > 0

    monkeypatch.setattr(ThreadDevice, "prepare", prepare)
    bench.loop.wake()
    assert done.wait(WAIT_S)  # a pause before each would take longer
    session, epoch, frames = bench.attach()
    done.clear()
    left[0] = 2
    bench.loop.granted(session, Grant(epoch, 1, start=[a_start(0, [1], [1, 2, 3])], budget=ROOMY), 0)
    assert read_until(frames, 1).tokens == {0: continuation([1], 8, 97)}
    assert done.wait(WAIT_S)
