"""Stage 7, second half: a worker that prefills, one that goes on, and their transfer agents by themselves.

Without a GPU the workers run a tiny shape on the CPU: what is told of times then means nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

from bench import ROOT
from bench.gpu.model import write_config
from bench.gpu.peers.pull import PAGES, visible_gpus
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES, TINY
from bench.harness.plain_pages import ids
from bench.harness.processes import Service
from quire.v1 import worker_pb2_grpc
from quire_common.credit import Budget, MoveKind, PageMove, RankAddress, Start
from quire_common.errors import DeadlineExceeded
from tests.fakes.worker.engine_bench import Told, a_start
from tests.fakes.worker.worker_server import FakeScheduler

_SHAPE, _TOKENS, _ANSWER = "8B", 4096, 8
_WARM, _REPEATS = 2, 5
_LIMIT_S = 120
# For what a worker is to report next; less than FakeScheduler gives its whole stream.
_HEAR_S = 20.0
# How much faster than through main memory.
_DIRECT = 3
_WAYS = {"cuda_ipc": ("cuda_ipc", "shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}
_ROOMY = Budget(8192, 8192, chunk_cap=2048, partial_prefills=4)


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Two GPUs, or two workers on what there is."""
    gpus = visible_gpus()
    if gpus:
        _transfer_agents(recorder, gpus, 65 if tiny else PAGES - 513)
    spec, tokens = (SHAPES[_SHAPE], _TOKENS) if gpus and not tiny else (TINY, 160)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model", spec, 2 * tokens)
        flags = ["--model", str(model), "--load-format", "dummy", "--max-num-seqs", "4"]
        flags += ["--kv-cache-memory-bytes", str(8 << 30 if gpus else 64 << 20)]
        with _worker(gpus[:1], flags) as theirs, _worker(gpus[-1:], flags) as ours:
            for config, names in _WAYS.items():
                with recorder.attempt(f"prefill and decode by {config}"):
                    _pair(recorder, theirs.ready(), ours.ready(), config, names, tokens, exact=not gpus)
        if gpus:
            # The token after a handover is computed as a prompt's last one is, and otherwise as one that follows.
            flags.append("--batch-invariant")
            with _worker(gpus[:1], flags) as theirs, _worker(gpus[-1:], flags) as ours:
                _pair(recorder, theirs.ready(), ours.ready(), "cuda_ipc", _WAYS["cuda_ipc"], tokens, exact=True)


def _transfer_agents(recorder: Recorder, gpus: list[str], pages: int) -> None:
    command = [sys.executable, "-m", "bench.gpu.peers.movers", "pull", str(pages), gpus[0]]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[-1]}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        recorder.check("pages by transfer agents", False, told=str(error.stdout)[-500:])
        return
    rates: dict[str, float] = {}
    for line in done.stdout.splitlines():
        figures = json.loads(line)
        name = figures.pop("name")
        rates[name] = figures.get("gb_per_s", 0.0)
        recorder.figure(f"transfer agents, {name}", **figures)
        recorder.check(f"bytes by transfer agents, {name}", figures.get("wrong", 1) == 0)
    # Where the memory cannot be opened, shared memory steps in without a word.
    direct = rates.get("cuda_ipc", 0.0) > _DIRECT * rates.get("shm", 0.0)
    recorder.check("pages by transfer agents", done.returncode == 0 and direct)


@contextlib.contextmanager
def _worker(gpus: list[str], flags: list[str]) -> Iterator[Service]:
    """On one GPU alone, where there is one."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        service = Service("worker", *flags)
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    with service:
        yield service


class _Side:
    """A worker, and a scheduler's hand on it."""

    def __init__(self, address: str, stack: contextlib.ExitStack) -> None:
        channel = stack.enter_context(grpc.insecure_channel(address))
        self.scheduler, self.told = FakeScheduler(worker_pb2_grpc.WorkerStub(channel)), Told()
        stack.callback(self.scheduler.cancel)
        self.hello = self.scheduler.attach()

    def tokens(self, slot: int, count: int) -> list[int]:
        """Once there are so many, as long as nothing fails. Raises DeadlineExceeded."""
        self._hear_until(lambda: len(self.told.tokens.get(slot, [])) >= count, f"{count} tokens of slot {slot}")
        return self.told.tokens[slot]

    def moved(self, move_id: int) -> tuple[int, int]:
        """Once it has ended. Raises DeadlineExceeded."""
        self._hear_until(lambda: move_id in self.told.moved, f"the end of move {move_id}")
        return self.told.moved[move_id]

    def _hear_until(self, there: Callable[[], bool], what: str) -> None:
        """A worker that lives gives heartbeats, so the stream alone would never tell that nothing comes."""
        until_s = time.monotonic() + _HEAR_S
        while not there():
            self.told.add(self.scheduler.next_frame())
            if self.told.errors:
                raise RuntimeError(f"a worker refuses: {self.told.errors}")
            if time.monotonic() > until_s and not there():
                raise DeadlineExceeded(
                    "WORKER_TOO_SLOW", f"{what} did not come within {_HEAR_S:g} s.", "See the workers' logs."
                )


def _pair(
    recorder: Recorder, theirs: str, ours: str, config: str, names: tuple[str, ...], tokens: int, *, exact: bool
) -> None:
    """`exact`: whether workers of this kind give a token the same bits however it is computed."""
    with contextlib.ExitStack() as stack:
        here, there = _Side(theirs, stack), _Side(ours, stack)
        source = tuple(address for address in here.hello.data_address if address.transport in names)
        if not source or source[0].transport != config:
            recorder.skip(f"prefill and decode by {config}", "the worker does not offer it")
            return
        found = [_hand_over(here, there, number, source, tokens) for number in range(_WARM + _REPEATS)]
    same = sum(each[0] for each in found)
    if exact:
        recorder.check(f"tokens go on by {config}", same == len(found), same=same, of=len(found))
    else:
        recorder.figure(f"tokens go on by {config}, as far as none are tied", same=same, of=len(found))
    pulled_ms, first_ms = ([each[place] * 1e3 for each in found[_WARM:]] for place in (1, 2))
    recorder.figure(
        f"from the end of a prefill of {tokens} tokens, {config}",
        pulled_ms=statistics.median(pulled_ms),
        first_decoded_ms=statistics.median(first_ms),
        slowest_ms=max(first_ms),
    )


def _hand_over(
    here: _Side, there: _Side, number: int, source: tuple[RankAddress, ...], tokens: int
) -> tuple[bool, float, float]:
    """Whether the tokens are those of one worker alone, and the seconds from the prefill's end to the last page, and to
    the first token that the other worker drew."""
    page_size, length = here.hello.model.pages.page_size, here.hello.model.max_model_len
    prompt = np.random.default_rng(number).integers(3, here.hello.model.vocab_size, tokens).tolist()
    pages = list(range(1, tokens // page_size + 2))
    handles = tuple(bytes([index % 256]) * 31 + bytes([number]) for index in range(len(pages) - 1))
    key, slot = os.urandom(32), 0
    export, pull = (
        PageMove(number, kind, 0, ids(*pages[:-1]), handles, b"id", lease_key=key, source=where)
        for kind, where in ((MoveKind.EXPORT, ()), (MoveKind.PULL, source))
    )

    def a_request(answer: int, output: tuple[int, ...] = ()) -> Start:
        return a_start(
            slot, prompt, pages, max_tokens=answer, ignore_eos=True, max_model_len=length, limit=length,
            output=output, cached=tokens if output else 0,
        )  # fmt: skip  # two lines of settings

    for side in (here, there):
        side.told.tokens.pop(slot, None)
    here.scheduler.grant(start=[a_request(1)], move=[export], budget=_ROOMY)
    there.scheduler.grant(move=[pull], budget=_ROOMY)
    first = tuple(here.tokens(slot, 1))
    ended = time.perf_counter()
    came = there.moved(number)
    pulled_s = time.perf_counter() - ended
    there.scheduler.grant(start=[a_request(_ANSWER, first)])
    there.tokens(slot, 1)
    first_s = time.perf_counter() - ended
    decoded = [*first, *there.tokens(slot, _ANSWER - 1)]
    here.moved(number)
    here.told.tokens.pop(slot, None)
    here.scheduler.grant(start=[a_request(_ANSWER)])
    alone = here.tokens(slot, _ANSWER)
    if came != (0, len(handles)):
        raise RuntimeError(f"of {len(handles)} pages {came} came")
    return decoded == alone, pulled_s, first_s
