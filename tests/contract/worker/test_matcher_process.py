"""The matcher's process lives and dies: restarts, hangs, orphans, and what it must not import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from quire.models import find_model
from quire_common.credit import KvGroup, ModelInfo, PageGeometry
from quire_common.sequence import Sequence, Stop
from quire_common.telemetry import metrics
from quire_worker.config import WorkerConfig
from quire_worker.matcher import matcher_factory
from quire_worker.matcher.matcher_factory import GRAMMAR_BYTES
from quire_worker.matcher.matcher_pool import MatcherPool
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.sampling.token_mask import MaskKind

WAIT_S = 60.0
VOCAB, EOS = 4096, (1, 4)
PROMPT = 4
# A loaded machine may keep a well process waiting for seconds.
PATIENT = replace(matcher_factory.TIMEOUTS, ping_s=0.1, silent_pings=100, start_pings=600, first_backoff_s=0.01)
INFO = ModelInfo(
    "m", "a", 64, VOCAB, EOS, b"d", PageGeometry(4, (KvGroup("full", 8, "token", "uint64", 1, 1, 1),), b"n" * 32)
)


def restarts() -> float:
    return metrics.registry.get_sample_value("quire_worker_matcher_restarts_total") or 0.0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], MatcherPool]]:
    made: list[MatcherPool] = []

    def make_pool(
        model: str, silent_pings: int = PATIENT.silent_pings, processes: int = 1, row_tokens: int = 1
    ) -> MatcherPool:
        monkeypatch.setattr(matcher_factory, "TIMEOUTS", replace(PATIENT, silent_pings=silent_pings))
        config = WorkerConfig(model=model, max_constrained_seqs=9, matcher_processes=processes, paced=0.0)
        made.append(matcher_factory.make_matcher(config, model, INFO, "cpu", row_tokens))
        return made[-1]

    yield make_pool
    for pool in made:
        pool.close()


def open_row(pool: MatcherPool, text: str = 'start: "a" /[0-9]+/ "b"') -> RowConstraint:
    return pool.open_sequence(Sequence(np.zeros(PROMPT, np.int32), Stop(20)), text)


def until(pool: MatcherPool, done: Callable[[], object]) -> None:
    clock = threading.Event()
    for _ in range(int(WAIT_S * 200)):
        pool.poll()
        if done():
            return
        clock.wait(0.005)
    raise AssertionError("nothing came of it")


def allowed(row: RowConstraint) -> list[int]:
    """The tokens that may come next."""
    found = row.mask_at(PROMPT + len(row.output))
    assert found is not None
    return np.flatnonzero(~found.forbidden(VOCAB)).tolist()


def has_mask(row: RowConstraint) -> bool:
    return row.mask_at(PROMPT + len(row.output)) is not None


def draw(pool: MatcherPool, row: RowConstraint) -> None:
    """Draw the first token that may come, and await the mask behind it."""
    row.mask_source.add_tokens([(row, allowed(row)[:1])])
    until(pool, lambda: has_mask(row))


def patched_process(*patches: str) -> str:
    """The program of a matcher's process with these lines before it runs."""
    imports = (
        "import os, sys, threading, time",
        "from quire_worker.matcher import matcher_main, matcher_threads",
        "from quire_worker.matcher.guidance_backend import GuidanceBackend as Backend, GuidanceGrammar as Grammar",
    )
    return "\n".join((*imports, *patches, "matcher_main.run_matcher(sys.argv[1:])"))


def pid_of(pool: MatcherPool) -> int:
    assert len(pool.pids) == 1
    return pool.pids[0]


def test_process_starts_with_the_first_grammar_and_makes_masks(make: Callable[[str], MatcherPool]) -> None:
    pool = make(str(find_model(None)))
    assert pool.pids == []
    row = open_row(pool)
    until(pool, lambda: row.is_open)
    for _ in range(6):
        draw(pool, row)
    assert len(row.output) == 6 and len(allowed(row)) >= 1
    loaded = {Path(each.path).name for each in psutil.Process(pid_of(pool)).memory_maps()}
    assert not {name for name in loaded if "torch" in name or "cuda" in name or "llvmlite" in name}


def test_lookahead_masks_equal_those_of_a_process_without_lookahead(
    make: Callable[..., MatcherPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLOW_NS is raised, so that no mask counts as slow on a busy machine."""
    patient = patched_process("from quire_worker.matcher import matcher", "matcher.SLOW_NS = 10**10")
    monkeypatch.setattr(matcher_factory, "COMMAND", (matcher_factory.COMMAND[0], "-c", patient))
    text = 'start: "{\\"name\\": \\"" /[a-z]/ "\\", \\"value\\": " /[0-9]/ "}"'
    plain, looking = make(str(find_model(None))), make(str(find_model(None)), row_tokens=8)
    reference, row = open_row(plain, text), open_row(looking, text)
    until(plain, lambda: reference.is_open)
    until(looking, lambda: row.is_open)
    while (next_mask := row.mask_at(row.next_position)) is not None and next_mask.kind is not MaskKind.END:
        first, tokens = row.next_position, allowed(row)[:1]
        masks = [next_mask]
        while masks[-1].kind is MaskKind.ONE:
            tokens = [*tokens[: len(masks) - 1], masks[-1].token]
            draw(plain, reference)
            found = reference.mask_at(reference.next_position)
            assert found is not None
            masks.append(found)
        last = first + len(masks) - 1
        until(looking, lambda last=last: row.mask_at(last))  # type: ignore[misc]  # bound now
        assert [row.mask_at(first + nth) for nth in range(len(masks))] == masks
        if len(masks) == 1:
            draw(plain, reference)
        row.mask_source.add_tokens([(row, tokens)])
        until(looking, lambda: has_mask(row))
        assert row.output == reference.output
    assert len(row.output) > 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process has mapped")
def test_several_processes_make_the_masks_of_one_ring(make: Callable[..., MatcherPool]) -> None:
    pool, alone = make(str(find_model(None)), processes=3), make(str(find_model(None)))
    rows = [open_row(pool) for _ in range(6)]
    reference = open_row(alone)
    until(pool, lambda: all(row.is_open for row in rows))
    until(alone, lambda: reference.is_open)
    assert len(set(pool.pids)) == 3
    for _ in range(4):
        draw(alone, reference)
        for row in rows:
            draw(pool, row)
            assert row.output == reference.output and allowed(row) == allowed(reference)
    pids = pool.pids
    pool.close()
    assert not any(map(psutil.pid_exists, pids))


def test_process_has_a_bound_on_its_memory_and_leaves_no_core(make: Callable[[str], MatcherPool]) -> None:
    pool = make(str(find_model(None)))
    row = open_row(pool)
    until(pool, lambda: row.is_open)
    process = psutil.Process(pid_of(pool))
    most = process.rlimit(psutil.RLIMIT_AS)[0]
    assert GRAMMAR_BYTES < most < GRAMMAR_BYTES + process.memory_info().vms + 1
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_process_is_replaced_and_the_same_masks_come(
    make: Callable[..., MatcherPool], number: signal.Signals
) -> None:
    pool = make(str(find_model(None)), 20 if number is signal.SIGSTOP else PATIENT.silent_pings)
    row, other = open_row(pool), open_row(pool, "start: /[a-z]+/")
    until(pool, lambda: row.is_open and other.is_open)
    for _ in range(4):
        draw(pool, row)
    before, pid, expected = restarts(), pid_of(pool), allowed(row)
    os.kill(pid, number)
    until(pool, lambda: restarts() > before)
    until(pool, lambda: row.is_open and other.is_open and pool.pids not in ([], [pid]))
    assert allowed(row) == expected and len(row.output) == 4 and row.failure is None
    draw(pool, row)
    assert not psutil.pid_exists(pid)


def test_process_ends_with_its_engine(make: Callable[[str], MatcherPool]) -> None:
    pool = make(str(find_model(None)))
    row = open_row(pool)
    until(pool, lambda: row.is_open)
    pid = pid_of(pool)
    os.kill(pid, signal.SIGTERM)  # what a supervisor sends to the whole group is the worker's affair
    draw(pool, row)
    assert pool.pids == [pid]
    pool.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("hangs", ["while True: pass", "threading.Event().wait()"], ids=["computes", "waits"])
def test_grammar_that_keeps_a_thread_too_long_is_found(
    hangs: str, make: Callable[[str], MatcherPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process, patched to hang at one text, ends itself; twice, and that sequence has failed, and no other."""
    limit = "CPU_LIMIT_S" if "while" in hangs else "WALL_LIMIT_S"
    stuck = patched_process(
        "compile = Backend.compile_grammar",
        "def slow(self, text):",
        "    if 'stuck' in text:",
        f"        {hangs}",
        "    return compile(self, text)",
        "Backend.compile_grammar = slow",
        f"matcher_threads.{limit} = 1.0",
    )
    monkeypatch.setattr(matcher_factory, "COMMAND", (matcher_factory.COMMAND[0], "-c", stuck))
    pool = make(str(find_model(None)))
    good = open_row(pool)
    until(pool, lambda: good.is_open)
    draw(pool, good)
    before, bad = restarts(), open_row(pool, 'start: "stuck"')
    until(pool, lambda: bad.failure is not None)
    assert bad.failure is not None and bad.failure.code == "GRAMMAR_CRASHED" and restarts() == before + 2
    pool.close_sequence(bad)
    until(pool, lambda: good.is_open)
    draw(pool, good)
    assert good.failure is None


def test_step_whose_masks_take_long_together_is_no_hang(
    make: Callable[..., MatcherPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process, patched to wait before it takes a token in: none of these waits is too long by itself."""
    lazy = patched_process(
        "accept = Grammar.accept_tokens",
        "def accept_later(self, tokens):",
        "    time.sleep(0.5 if tokens else 0.0)",
        "    accept(self, tokens)",
        "Grammar.accept_tokens = accept_later",
    )
    monkeypatch.setattr(matcher_factory, "COMMAND", (matcher_factory.COMMAND[0], "-c", lazy))
    silent_pings, before = 20, restarts()
    pool = make(str(find_model(None)), silent_pings)
    rows = [open_row(pool) for _ in range(8)]
    assert 0.5 * len(rows) > 1.5 * silent_pings * PATIENT.ping_s
    until(pool, lambda: all(row.is_open for row in rows))
    for row in rows:
        row.mask_source.add_tokens([(row, allowed(row)[:1])])
    until(pool, lambda: all(has_mask(row) for row in rows))
    assert restarts() == before and all(row.failure is None for row in rows)


def test_grammar_that_kills_the_process_fails_alone_beside_eight(
    make: Callable[[str], MatcherPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process aborts, as for want of memory, with the second token of one grammar. Nobody else loses more than
    time."""
    deadly = patched_process(
        "compile, accept = Backend.compile_grammar, Grammar.accept_tokens",
        "def compile_marked(self, text):",
        "    compiled = compile(self, text)",
        "    compiled[0].deadly, compiled[0].fed = 'deadly' in text, 0",
        "    return compiled",
        "def accept_or_abort(self, tokens):",
        "    self.fed += len(tokens)",
        "    if self.deadly and self.fed > 1: os.abort()",
        "    accept(self, tokens)",
        "Backend.compile_grammar, Grammar.accept_tokens = compile_marked, accept_or_abort",
    )
    model, texts = str(find_model(None)), [f'start: "{letter}" /[0-9]+/' for letter in "abcdefgh"]

    def answers(with_deadly: bool) -> list[list[int]]:
        monkeypatch.setattr(matcher_factory, "COMMAND", (*matcher_factory.COMMAND[:1], "-c", deadly))
        pool = make(model)
        rows = [open_row(pool, text) for text in texts]
        if with_deadly:
            bad = open_row(pool, "start: deadly\ndeadly: /[a-z]+/")
            before = restarts()
            until(pool, lambda: bad.is_open)
            draw(pool, bad)
            bad.mask_source.add_tokens([(bad, allowed(bad)[:1])])
            until(pool, lambda: bad.failure is not None)
            assert bad.failure is not None and bad.failure.code == "GRAMMAR_CRASHED"
            assert restarts() == before + 2
        for _ in range(5):
            until(pool, lambda: all(row.is_open and has_mask(row) for row in rows))
            for row in rows:
                row.mask_source.add_tokens([(row, allowed(row)[:1])])
        assert all(row.failure is None for row in rows)
        return [row.output for row in rows]

    assert answers(True) == answers(False)


def test_ambiguous_grammar_fails_and_others_go_on_meanwhile(make: Callable[[str], MatcherPool]) -> None:
    """Its masks would take seconds each. Beside it, sequences with other grammars get a token for each of its."""
    pool = make(str(find_model(None)))
    before = restarts()
    slow = open_row(pool, "start: s\ns: /[a-z ]/ | s s | s s s")
    others = [open_row(pool) for _ in range(3)]
    until(pool, lambda: slow.is_open and all(row.is_open for row in others))
    while slow.failure is None:
        for row in others:
            draw(pool, row)
        if has_mask(slow):
            # The masks of the longest text: the more letters, the more derivations.
            slow.mask_source.add_tokens([(slow, allowed(slow)[-1:])])
        pool.poll()
    assert slow.failure.code in ("GRAMMAR_TOO_SLOW", "GRAMMAR_FAILED")
    assert restarts() == before and all(row.failure is None and row.is_ready for row in others)
    assert min(len(row.output) for row in others) > len(slow.output) > 2


def test_complete_answer_has_its_end_left(make: Callable[[str], MatcherPool]) -> None:
    pool = make(str(find_model(None)))
    row = open_row(pool, 'start: "a"')
    until(pool, lambda: row.is_open)
    draw(pool, row)
    found = row.mask_at(PROMPT + 1)
    assert found is not None and found.kind is MaskKind.END and allowed(row) == sorted(EOS)
