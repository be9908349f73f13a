"""Two paced workers as processes: one prefills what the other pulls and goes on with, whatever becomes of the first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from bench.harness.plain_pages import ids
from bench.harness.processes import Service
from quire.v1 import worker_pb2_grpc
from quire_common.credit import Budget, MoveKind, PageMove, Start
from quire_common.pages import chain_hashes
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from tests.fakes.worker.engine_bench import ROOMY, a_start
from tests.fakes.worker.worker_side import Side
from tests.tiers import deep_after

FLAGS = ("--paced", "1", "--paced-pages", "200", "--block-size", "4", "--max-num-seqs", "4", "--max-model-len", "256")
PROMPT = [*range(20, 60), 7, 8]
PAGES = list(range(1, 12))
HANDLES = (*chain_hashes(PROMPT, 4), b"t" * 32)
SEEDED = Sampling(temperature=0.8, seed=11)
TOKENS = 12
A_CHUNK = Budget(1000, 1000, chunk_cap=4, partial_prefills=9, step_limit=1)


def answer() -> list[int]:
    return paced_tokens(PROMPT, Stop(TOKENS, ignore_eos=True), SEEDED).tokens


def start(pages: list[int], max_tokens: int, output: tuple[int, ...] = ()) -> Start:
    return a_start(
        0, PROMPT, pages, output=output, cached=len(PROMPT) if output else 0, max_tokens=max_tokens, ignore_eos=True,
        max_model_len=256, sampling=SEEDED,
    )  # fmt: skip


@contextmanager
def a_side(*flags: str) -> Iterator[tuple[Service, Side]]:
    with Service("worker", *FLAGS, *flags) as process:
        with grpc.insecure_channel(process.ready()) as channel:
            side = Side(worker_pb2_grpc.WorkerStub(channel))
            yield process, side
            side.scheduler.cancel()
        process.popen.kill()


def begin(here: Side, there: Side) -> None:
    """The first of eleven pages is filled, and the second worker has asked for all."""
    lease = {"tail_tokens": 2, "lease_key": b"k" * 32}
    export = PageMove(1, MoveKind.EXPORT, 0, ids(*PAGES), HANDLES, b"id", **lease)  # type: ignore[arg-type]  # two fields
    pull = PageMove(1, MoveKind.PULL, 0, ids(*PAGES), HANDLES, b"id", source=here.hello.data_address, **lease)  # type: ignore[arg-type]  # two fields
    here.scheduler.grant(start=[start(PAGES, 1)], move=[export], budget=A_CHUNK)
    here.prefilled(0, 4)
    there.scheduler.grant(move=[pull], budget=ROOMY)


def finish(there: Side, first: int) -> list[int]:
    there.scheduler.grant(start=[start(list(range(1, 15)), TOKENS, (first,))])
    return [first, *there.finished(0)]


@pytest.mark.parametrize("transport", deep_after(1, ["tcp", "shm", "grpc"]))
def test_complete_pull_computes_nothing_again(transport: str) -> None:
    with a_side("--peer-transport", transport) as (_, here), a_side("--peer-transport", transport) as (_, there):
        begin(here, there)
        here.scheduler.grant(budget=ROOMY)
        (first,) = here.finished(0)
        assert there.moved(1) == (0, 11) and here.moved(1) == (0, 11)
        assert finish(there, first) == answer()
        # What is prefilled is what follows the cached range: the first token alone.
        assert sum(report.step_prefill_tokens.sum() for report in there.told.reports) == 1


@pytest.mark.parametrize("number", deep_after(1, [signal.SIGSTOP, signal.SIGKILL]))
def test_missing_pages_of_a_lost_worker_are_computed(number: signal.Signals) -> None:
    """The process of the engine alone is hit; its KV transfer agent must not seem to live on."""
    with a_side() as (process, here), a_side() as (_, there):
        begin(here, there)
        here.scheduler.grant()
        here.prefilled(0, 8)
        os.kill(process.pid, number)
        status, pages = there.moved(1)
        assert status == 1 and pages < 11
        assert finish(there, answer()[0]) == answer()
        computed = sum(report.step_prefill_tokens.sum() for report in there.told.reports)
        assert computed == len(PROMPT) + 1 - 4 * pages
        there.scheduler.grant(cancel_move=np.array([1], np.int64))
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            here.scheduler.grant(cancel_move=np.array([1], np.int64))
            assert here.moved(1) == (1, 0)
