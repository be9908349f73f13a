"""ConstrainedEngine: an engine with paced steps and a real matcher process, which runs rows with and without
grammars."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Budget, Grant, KvGroup, ModelInfo, PageGeometry, Start
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_common.structured.constraint import Constraint
from quire_worker.config import WorkerConfig
from quire_worker.engine.device import ThreadDevice
from quire_worker.engine.engine import Engine
from quire_worker.engine.spec import EngineSpec
from quire_worker.matcher.matcher_factory import make_matcher
from quire_worker.paced.facts import read_facts
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quire_common.credit import Report

_PAGE, _PROMPT = 64, 64
# Tokens of rows with grammars, beyond those of the others: these must end first.
_MORE = 500
_WAIT_S = 60.0
_ROOMY = Budget(65_536, 65_536, 65_536, 1_000)


@dataclass(frozen=True)
class Rows:
    """The numbers of rows and tokens of a run."""

    free: int
    constrained: int
    step_ms: float
    tokens: int
    """The tokens of each row without a grammar."""


@dataclass
class Measured:
    """The results of a run. Gaps are milliseconds between two tokens of the rows without a grammar."""

    gaps_ms: list[float]
    tokens_per_s: float
    held: float
    """Share of the places of constrained rows that were held."""
    mask_us: float
    """Mean time of a mask in the matcher."""
    outputs: list[list[int]]
    """Tokens of the rows with grammars."""


class ConstrainedEngine:
    """Serves rows until those without a grammar have their tokens. An object runs once, and `close` ends its
    process."""

    def __init__(self, model: str, rows: Rows, grammar: str) -> None:
        facts = read_facts(model)
        self._rows, self._grammar = rows, grammar
        count = rows.free + rows.constrained
        self._pages_each = -(-(_PROMPT + rows.tokens + _MORE + 1) // _PAGE)
        num_pages = 1 + count * self._pages_each
        spec = EngineSpec(
            max_num_seqs=count,
            max_model_len=_PROMPT + rows.tokens + _MORE + 1,
            vocab_size=facts.vocab_size,
            page_size=_PAGE,
            num_pages=num_pages,
            eos_token_ids=facts.eos_token_ids,
        )
        group = KvGroup("full", 8 * _PAGE, "token", "uint64", 1, 1, 1)
        info = ModelInfo(
            "paced",
            "PacedForCausalLM",
            spec.max_model_len,
            spec.vocab_size,
            spec.eos_token_ids,
            facts.digest,
            PageGeometry(_PAGE, (group,), b"paced".ljust(32)),
        )
        self._matcher = make_matcher(WorkerConfig(model=model, paced=rows.step_ms), model, info, "cpu")
        self._device = ThreadDevice(PacedRunner(PageArray(num_pages, _PAGE), spec.vocab_size, rows.step_ms))
        self._engine = Engine(spec, self._device, matcher=self._matcher)
        self._woken = threading.Event()
        self._device.wake = self._matcher.wake = self._woken.set
        self._constrained: dict[int, list[int]] = {slot: [] for slot in range(rows.free, count)}
        self._arrivals: list[float] = []
        self._tokens = self._ended = 0

    def run(self, seed: int) -> Measured:
        """Start the rows with grammars. When each of them has its first token, start the others, and step until these
        end."""
        rng = np.random.default_rng(seed)
        self._grant(1, self._constrained, rng)
        self._step_until(lambda: all(self._constrained.values()))
        began, masks, kept, steps = time.perf_counter(), self._matcher.mask_totals, self._kept(), self._engine.steps
        self._grant(2, range(self._rows.free), rng)
        self._step_until(lambda: self._ended == self._rows.free)
        made, elapsed_ns = (after - before for after, before in zip(self._matcher.mask_totals, masks, strict=True))
        wanted = (self._engine.steps - steps) * self._rows.constrained
        return Measured(
            gaps_ms=(np.diff(self._arrivals) * 1e3).tolist(),
            tokens_per_s=self._tokens / (self._arrivals[-1] - began),
            held=1 - (self._kept() - kept) / wanted if wanted else 0.0,
            mask_us=elapsed_ns / made / 1e3 if made else 0.0,
            outputs=list(self._constrained.values()),
        )

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Run steps, and count the tokens in the Reports."""
        while not done():
            self._woken.clear()
            while self._engine.launch():
                pass
            while (report := self._engine.collect()) is not None:
                self._count(report)
                self._engine.launch()
            if not done() and not self._woken.wait(_WAIT_S):
                raise RuntimeError("the engine stands still")

    def close(self) -> None:
        """End the device's thread and the matcher's process."""
        self._engine.begin_run()
        self._device.close()
        self._matcher.close()

    def _kept(self) -> int:
        """Tokens of the rows with grammars so far."""
        return sum(map(len, self._constrained.values()))

    def _grant(self, seq: int, slots: Iterable[int], rng: np.random.Generator) -> None:
        """Start these slots with one Grant. Rows with grammars have no end within the run."""
        starts, limit = [], self._engine.spec.max_model_len
        for slot in slots:
            constraint = Constraint.of(self._grammar) if slot in self._constrained else None
            first = 1 + slot * self._pages_each
            sequence = Sequence(
                rng.integers(10, 4_000, _PROMPT).astype(np.int32),
                Stop(self._rows.tokens + (_MORE if constraint else 0), ignore_eos=True),
                Sampling(temperature=1.0, seed=int(rng.integers(1 << 30))),
                constraint=constraint,
            )
            pages = np.arange(first, first + self._pages_each, dtype=np.int32)
            starts.append(Start(slot, slot, sequence, 0, (pages,), limit, RequestContext(f"r{slot}"), limit))
        self._engine.apply(Grant(epoch=self._engine.epoch, seq=seq, start=starts, budget=_ROOMY))

    def _count(self, report: Report) -> None:
        """Take in a Report."""
        if report.error:
            raise RuntimeError(f"rows failed: {report.error}")
        mine = first = 0
        columns = zip(report.slot.tolist(), report.count.tolist(), report.finish.tolist(), strict=True)
        for slot, count, finish in columns:
            if slot in self._constrained:
                self._constrained[slot] += report.token[first : first + count].tolist()
            else:
                mine += count
                self._ended += bool(finish)
            first += count
        if mine:
            self._arrivals.append(time.perf_counter())
            self._tokens += mine
