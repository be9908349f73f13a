"""The paced worker as a process over gRPC: it answers as `paced_tokens` says, in time, and goes wrong as it is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from bench.harness.process_cpu import cpu_s
from bench.harness.processes import Service
from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.credit import Finish
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.faults import EXIT_DIED
from tests.fakes.worker.engine_bench import ROOMY, Told, a_start
from tests.fakes.worker.worker_server import FakeScheduler

FLAGS = ("--paced-pages", "200", "--block-size", "4", "--max-num-seqs", "4", "--max-model-len", "256")
PROMPTS = {0: [5, 6, 7], 1: list(range(20, 60)), 2: [90] * 17}
SEEDED = Sampling(temperature=0.8, seed=11)
TOKENS = 40
SILENCE_S = 1.5


@contextmanager
def paced(step_ms: float, *flags: str) -> Iterator[tuple[Service, FakeScheduler]]:
    """A paced worker, and a scheduler that granted three requests all that they need."""
    with Service("worker", "--paced", str(step_ms), *FLAGS, *flags) as process:
        with grpc.insecure_channel(process.ready()) as channel:
            scheduler = FakeScheduler(worker_pb2_grpc.WorkerStub(channel))
            scheduler.attach()
            starts = [
                a_start(
                    slot, prompt, list(range(1 + 40 * slot, 41 + 40 * slot)), max_tokens=TOKENS, ignore_eos=True,
                    max_model_len=256, key=slot, sampling=SEEDED,
                )
                for slot, prompt in PROMPTS.items()
            ]  # fmt: skip
            scheduler.grant(start=starts, budget=ROOMY)
            yield process, scheduler
            scheduler.cancel()
        process.popen.kill()


def answers() -> dict[int, list[int]]:
    stop = Stop(TOKENS, ignore_eos=True)
    return {slot: paced_tokens(prompt, stop, SEEDED).tokens for slot, prompt in PROMPTS.items()}


def told_until_silence(scheduler: FakeScheduler) -> Told:
    """What comes in a time in which all could have come."""
    told = Told()
    threading.Timer(SILENCE_S, scheduler.cancel).start()
    with pytest.raises(grpc.RpcError) as ended:
        while True:
            told.add(scheduler.next_report())
    assert ended.value.code() == grpc.StatusCode.CANCELLED
    return told


@pytest.mark.parametrize("flags", [(), ("--lockstep",)])
def test_paced_worker_answers_right_in_the_time_of_its_steps(flags: tuple[str, ...]) -> None:
    with paced(5.0, *flags) as (_, scheduler):
        told, began = Told(), time.monotonic()
        while len(told.finish) < len(PROMPTS):
            told.add(scheduler.next_report())
        # The first step may have ended before the clock was started.
        assert time.monotonic() - began >= (TOKENS - 1) * 0.005
    assert told.tokens == answers() and set(told.finish.values()) == {Finish.LENGTH} and not told.errors


@pytest.mark.parametrize("flags", [(), ("--lockstep",)])
def test_rows_of_any_number_of_tokens_give_the_same_answers(flags: tuple[str, ...]) -> None:
    with paced(0.5, "--paced-yields", "7", *flags) as (_, scheduler):
        told = Told()
        while len(told.finish) < len(PROMPTS):
            told.add(scheduler.next_report())
    assert told.tokens == answers() and set(told.finish.values()) == {Finish.LENGTH} and not told.errors
    counts = [count for report in told.reports for count in report.count.tolist()]
    assert {2, 3, 4} <= set(counts), "rows drew several tokens"
    rows = sum(report.steps for report in told.reports) * len(PROMPTS)
    assert rows > len(counts), "and some were held"


def test_paced_worker_starts_fast_and_stops_on_sigterm() -> None:
    with Service("worker", "--paced", "2") as process:
        process.ready()
        spent_s = cpu_s(process.popen.pid)
        assert spent_s < 5, "of a processor: a busy machine may take longer"
        assert process.stop() == 0


def test_paced_worker_exits_at_the_given_step() -> None:
    with paced(1.0, "--paced-fault", "die@10") as (process, scheduler):
        told = Told()
        with pytest.raises(grpc.RpcError) as ended:
            while True:
                told.add(scheduler.next_report())
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.popen.wait(30) == EXIT_DIED
    assert sum(report.steps for report in told.reports) < 10


def test_paced_worker_hangs_at_the_given_step_with_heartbeats() -> None:
    with paced(1.0, "--paced-fault", "hang@10") as (process, scheduler):
        told = told_until_silence(scheduler)
        assert sum(report.steps for report in told.reports) == 9
        with grpc.insecure_channel(process.address()) as channel:
            status = worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.GetStatusRequest())
        assert status.steps == 9


@pytest.mark.deep
def test_paced_worker_changes_epoch_at_the_given_step() -> None:
    with paced(1.0, "--paced-fault", "wrong-epoch@10") as (_, scheduler):
        told, right, wrong = Told(), 0, 0
        while len(told.finish) < len(PROMPTS):
            told.add(report := scheduler.next_report())
            last = report.first_step + report.steps - 1
            if report.epoch == scheduler.hello.epoch:
                right += 1
                assert last < 10
            elif report.steps:
                wrong += 1
                assert last >= 10
    assert right and wrong


@pytest.mark.deep
def test_paced_worker_can_fall_silent() -> None:
    with paced(1.0, "--paced-fault", "silent@10") as (process, scheduler):
        told = told_until_silence(scheduler)
        # A Report of several steps that reaches the tenth is not sent either.
        assert 0 < sum(report.steps for report in told.reports) < 10
        assert process.popen.poll() is None


@pytest.mark.deep
def test_a_slow_step_and_a_nan_in_one_worker() -> None:
    with paced(1.0, "--paced-fault", "slow@10:1500,nan@20") as (_, scheduler):
        told = Told()
        while len(told.finish) < len(PROMPTS):
            told.add(scheduler.next_report())
    slowest = max(timing.forward for report in told.reports for timing in report.timing)
    # A step that began late is shorter by as much: the schedule is kept.
    assert slowest >= 200_000
    failed = told.errors[0][0]
    assert told.codes() == [(failed, "NAN_LOGITS")]
    healthy = {slot: tokens for slot, tokens in answers().items() if slot != failed}
    assert {slot: tokens for slot, tokens in told.tokens.items() if slot != failed} == healthy


@pytest.mark.deep
def test_an_unknown_fault_ends_the_start_with_what_is_supported() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire_worker", "--paced", "1", "--paced-fault", "melt@3", "--listen", "127.0.0.1:0"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "BAD_FAULT" in done.stderr and "slow@N:MS" in done.stderr
