"""One life of a replica in virtual time: the real scheduler core and the real engine, two delay lines, a kvstore, and
clients who ask, abort and listen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import worker_pb2
from quire_common.credit import WorkerHello, decode_report, encode_grant
from quire_common.errors import InvalidArgument
from quire_common.sequence import RequestContext, Sequence, Stop
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.outputs import FinishReason
from quire_scheduler.scheduler import Scheduler
from quire_worker.engine.engine import Engine
from tests.exactness.events import Events
from tests.exactness.flaky_runner import FlakyRunner
from tests.exactness.subject import engine_spec
from tests.exactness.virtual_device import VirtualDevice
from tests.exactness.virtual_mover import VirtualMover, VirtualStore
from tests.exactness.virtual_time import BEGIN_S, DelayLine, VirtualTime
from tests.exactness.virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from quire_common.credit import Report
    from quire_scheduler.outputs import SessionOutputs
    from tests.exactness.scenario import Ask, Scenario
    from tests.exactness.subject import Subject

Key = tuple[int, int]
DEPTH = 2


@dataclass
class Heard:
    """What a client heard of one request: tokens, and its end: a FinishReason's name or an error's code."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1


class VirtualReplica:
    """`run` serves the scenario and returns what was heard, by place in the scenario's asks. One use."""

    def __init__(self, subject: Subject, scenario: Scenario, *, lockstep: bool, sequences: dict[int, Sequence]) -> None:
        self.events = Events()
        self.heard: dict[int, Heard] = {}
        self.time = VirtualTime()
        self._scenario = scenario
        self._sequences = sequences
        self._rng = np.random.default_rng((scenario.seed, 5))
        self._store = VirtualStore(self.time, self._rng, scenario.store_us, self._looked_up)
        parts = subject.parts(num_pages(subject, scenario), scenario.seed)
        self._runner = FlakyRunner(parts.runner, self._rng, scenario.lose_rows)
        self.device = VirtualDevice(self.time, self._rng, self._runner, parts.memory, scenario.step_us, scenario.settle)
        self._mover = VirtualMover(
            self.time, self._rng, parts.pages, self._store.pages, scenario.store_us, scenario.fail_moves
        )
        spec = engine_spec(subject, scenario.max_num_seqs, num_pages(subject, scenario))
        self.engine = Engine(spec, self.device, self._mover, depth=1 if lockstep else DEPTH)
        hello = WorkerHello(
            self.engine.epoch, spec.num_slots, spec.max_num_seqs, (spec.num_pages,), subject.info, capabilities=("cpu",)
        )
        self.core = Scheduler(_config(scenario, lockstep=lockstep), hello, kvstore=scenario.kvstore)
        reports = DelayLine(self.time, self._rng, scenario.report_us, self._reported)
        self._worker = VirtualWorker(
            self.time,
            self._rng,
            self.engine,
            self.device,
            reports.send,
            self.events,
            think_us=scenario.think_us,
            coalesce=scenario.coalesce,
        )
        self._grants = DelayLine(self.time, self._rng, scenario.grant_us, self._worker.granted)
        self.device.wake = self._mover.wake = self._worker.wake
        self._pump_due = False
        self._places: dict[Key, int] = {}

    def run(self) -> dict[int, Heard]:
        """The whole life, and the inventory at its end."""
        for place, ask in enumerate(self._scenario.asks):
            if place in self._sequences:
                self.time.at(ask.at_us, lambda place=place, ask=ask: self._submit(place, ask))  # type: ignore[misc]  # defaults bind the loop's variables
        self.time.run()
        self._collect(self.core.take_outputs())
        self._inventory()
        stats = self.core.stats
        self.events.update(
            {
                "siblings": sum(ask.sampling.sample > 0 for ask in self._scenario.asks),
                "preemptions": stats.preemptions,
                "reclaims": stats.reclaims,
                "pages lost": stats.pages_lost,
                "late tokens": stats.late_tokens,
                "failed moves": self._mover.failed,
                "kvstore hits": self._store.hits,
                "grants": stats.grants,
                "requests": len(self._places),
                "continued": sum(len(sequence.output_ids) > 0 for sequence in self._sequences.values()),
                "deadlines exceeded": sum(heard.end == "DEADLINE_EXCEEDED" for heard in self.heard.values()),
            }
        )
        return self.heard

    def _submit(self, place: int, ask: Ask) -> None:
        key = (ask.session, place)
        now_us = self.time.now_us
        deadline_ms = int(BEGIN_S * 1000) + (now_us + ask.deadline_us) // 1000 + 1 if ask.deadline_us else 0
        context = RequestContext(f"r{place}", tenant=ask.tenant, priority=ask.priority, deadline_unix_ms=deadline_ms)
        self._places[key] = place
        self.heard[place] = Heard()
        try:
            self.core.submit(ask.session, place, context, self._sequences[place], self.time.now_s)
        except InvalidArgument as error:
            self.heard[place].end = error.code
            return
        if ask.abort_us is not None:
            self.time.after(ask.abort_us, lambda: self._abort(key))
        if deadline_ms:
            self.time.at((deadline_ms - int(BEGIN_S * 1000)) * 1000, self._changed)
        self._changed()

    def _abort(self, key: Key) -> None:
        if self.core.abort(*key, self.time.now_s):
            self.events["aborted"] += 1
            self._changed()

    def _reported(self, frame: bytes) -> None:
        report = decode_report(worker_pb2.Report.FromString(frame))
        self._watch(report)
        self._collect(self.core.on_report(report, self.time.now_s))
        self._changed()

    def _looked_up(self, uid: int, result: object) -> None:
        self.core.on_lookup(uid, result)  # type: ignore[arg-type]  # the store answers with LookupResults
        self._changed()

    def _changed(self) -> None:
        """Make Grants soon: the scheduler's loop, too, may be slow to notice."""
        self._store.carry_out(self.core.take_effects())
        if not self._pump_due:
            self._pump_due = True
            self.time.after(int(self._rng.integers(0, self._scenario.think_us + 1)), self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        while (grant := self.core.next_grant(self.time.now_s)) is not None:
            self._grants.send(encode_grant(grant).SerializeToString())
            self._store.carry_out(self.core.take_effects())
        self._store.carry_out(self.core.take_effects())
        self._collect(self.core.take_outputs())
        if self._rng.random() < 0.1:
            self.core.check_integrity()

    def _collect(self, outputs: list[SessionOutputs]) -> None:
        for out in outputs:
            at = 0
            for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
                heard = self.heard[self._places[out.session, handle]]
                assert not heard.end, f"request {handle}: a row after the end"
                heard.tokens += out.token[at : at + count].tolist()
                at += count
                if finish:
                    heard.end = FinishReason(finish).name
            assert at == len(out.token), "tokens of no row"
            if out.logprobs is not None:
                owner = out.handle.repeat(out.count)
                for index, value in zip(out.logprobs.token_index.tolist(), out.logprobs.logprob.tolist(), strict=True):
                    self.heard[self._places[out.session, int(owner[index])]].logprobs.append(value)
            for note in out.finished:
                heard = self.heard[self._places[out.session, note.handle]]
                heard.prompt_tokens, heard.completion_tokens = note.prompt_tokens, note.completion_tokens
            for failed in out.failed:
                heard = self.heard[self._places[out.session, failed.handle]]
                assert not heard.end, f"request {failed.handle}: failed after its end"
                heard.end = failed.error.code

    def _watch(self, report: Report) -> None:
        """Count ends that come late: of a sequence that no longer holds its slot."""
        slots = self.core._replica.slots
        applied = np.repeat(report.step_applied, report.step_rows)
        late = ~(slots.active[report.slot] & (slots.start_seq[report.slot] <= applied))
        self.events["late rows"] += int(late.sum())
        self.events["late ends"] += int((late & (report.finish > 0)).sum())

    def _inventory(self) -> None:
        """Nothing is left: no request, no step, no page, no lease."""
        self.engine.check_integrity()
        self.core.check_integrity()
        unheard = [place for place, heard in self.heard.items() if not heard.end]
        assert not unheard, f"stuck: requests {unheard} never ended; {self.core.load()}"
        assert self.core.quiet, "the core is not quiet"
        load = self.core.load()
        assert load.free_pages == load.pages and not load.referenced_pages, f"pages are kept: {load}"
        assert self.core.names.num_named == 0, "names are kept"
        assert not self._store.leases, "a lease is kept"
        assert not self.device.in_flight and not self.engine.residents.table.started(), "the worker still works"


def num_pages(subject: Subject, scenario: Scenario) -> int:
    """Page 0, enough for the largest request, and some to spare."""
    size = subject.scale.page_size
    longest = max(ask.shared + ask.own + ask.max_tokens for ask in scenario.asks)
    return 1 + -(-min(longest, subject.scale.max_model_len) // size) + scenario.spare_pages


def a_sequence(ask: Ask, subject: Subject, output_ids: list[int]) -> Sequence:
    """What the client asks for."""
    stop = Stop(ask.max_tokens, ask.min_tokens, ask.stop_token_ids, ask.ignore_eos)
    return Sequence(
        ask.prompt(subject.scale),
        stop,
        ask.sampling,
        np.array(output_ids, np.int32),
        skip_cache_read=ask.skip_cache_read,
    )


def _config(scenario: Scenario, *, lockstep: bool) -> SchedulerConfig:
    return SchedulerConfig(
        scheduling_policy=scenario.policy,
        max_num_batched_tokens=scenario.tokens_per_step,
        long_prefill_token_threshold=scenario.chunk,
        max_num_partial_prefills=scenario.partial,
        prefill_tokens_beside_decoders=scenario.beside,
        max_num_seqs=scenario.rows,
        lockstep=lockstep,
    )
