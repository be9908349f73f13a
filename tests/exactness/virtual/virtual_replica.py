"""One life of a replica in virtual time: the real scheduler core and the real engine between two delay lines, a
kvstore, and clients. Sometimes the scheduler is lost and another attaches to the worker, which steps on meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from quire.v1 import worker_pb2
from quire_common.credit import StepTiming, WorkerHello, decode_report, encode_grant
from quire_common.errors import QuireError, Unavailable
from quire_common.sequence import RequestContext, Sequence, Stop
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.structured.constraint import Constraint
from quire_scheduler.batching.token_matrix import TokenMatrix
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from quire_worker.engine.engine import Engine
from quire_worker.paced.random_yields import RandomYields
from tests.exactness.clients import LOST, Clients
from tests.exactness.events import Events
from tests.exactness.flaky_runner import FlakyRunner
from tests.exactness.scenario import longest
from tests.exactness.subject import engine_spec
from tests.exactness.virtual.connector_agent import ConnectorAgent
from tests.exactness.virtual.tiered_store import TieredStore
from tests.exactness.virtual.virtual_agent import VirtualTransferAgent
from tests.exactness.virtual.virtual_device import VirtualDevice
from tests.exactness.virtual.virtual_kvstore import VirtualStore
from tests.exactness.virtual.virtual_matcher import VirtualMatcher
from tests.exactness.virtual.virtual_time import BEGIN_S, DelayLine, VirtualTime
from tests.exactness.virtual.virtual_worker import VirtualWorker
from tests.fakes.worker.checked_schedules import check_schedules

if TYPE_CHECKING:
    from quire_common.credit import Report
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.clients import Heard
    from tests.exactness.scenario import Ask, Scenario
    from tests.exactness.subject import Subject
    from tests.exactness.virtual.tiered_store import KeptPages
    from tests.exactness.warm.hit_rights import HitRights

# Between two looks whether somebody has ended.
_LOOK_AGAIN_US = 5_000


class VirtualReplica:
    """`run` serves the scenario and returns what was heard, by place in the scenario's asks. One use."""

    def __init__(
        self,
        subject: Subject,
        scenario: Scenario,
        *,
        lockstep: bool,
        sequences: dict[int, Sequence],
        kept: KeptPages | None = None,
        rights: HitRights | None = None,
    ) -> None:
        self.events = Events()
        self.time = VirtualTime()
        self._subject = subject
        self._scenario = scenario
        self._sequences = sequences
        self._clients = Clients(scenario, sequences)
        self._rights = rights
        self._config = _config(scenario, lockstep=lockstep)
        self._rng = np.random.default_rng((scenario.seed, 5))
        parts = subject.parts(num_pages(subject, scenario), scenario.seed)
        runner = FlakyRunner(parts.runner, self._rng, scenario.lose_rows)
        yields = RandomYields(parts.draft_runner, subject.scale.vocab_size, scenario.seed, scenario.odds)
        self._device = VirtualDevice(
            self.time, self._rng, runner, parts.memory, scenario.step_us, scenario.settle, yields
        )
        self._store, self._transfer_agent = self._caches(parts.pages, kept)
        spec = engine_spec(
            subject,
            scenario.max_num_seqs,
            num_pages(subject, scenario),
            scenario.row_tokens,
            scenario.constrained_row_tokens,
        )
        self._matcher = None
        if scenario.matcher is not None:
            weather = subject.backend, subject.scale.vocab_size, scenario.matcher
            self._matcher = VirtualMatcher(self.time, self._rng, *weather, self.events, scenario.constrained_row_tokens)
        self._engine = Engine(
            spec,
            self._device,
            self._transfer_agent,
            depth=1 if lockstep else scenario.depth,
            matcher=None if self._matcher is None else self._matcher.client,
        )
        check_schedules(self._engine)
        self._worker = VirtualWorker(
            self.time,
            self._rng,
            self._engine,
            self._device,
            self.events,
            think_us=scenario.think_us,
            coalesce=scenario.coalesce,
        )
        self._device.wake = self._transfer_agent.wake = self._worker.wake
        if self._matcher is not None:
            self._matcher.client.wake = self._worker.wake
        self._pump_due = False
        self._attach()

    def run(self) -> dict[int, Heard]:
        """The whole life, and the inventory at its end."""
        scenario, time = self._scenario, self.time
        for place in self._sequences:
            if scenario.asks[place].follows is None:
                time.at(scenario.asks[place].at_us, lambda place=place: self._ask(place))  # type: ignore[misc]  # the default binds the loop's variable
            else:
                self._ask_after(place)
        if scenario.lost_us is not None:
            time.at(scenario.lost_us, self._lose_scheduler)
        if scenario.leave_us is not None:
            time.at(scenario.leave_us, self._lose_session)
        time.run()
        self._clients.collect(self._core.take_outputs())
        self._inventory()
        self._count()
        return self._clients.heard

    def _caches(self, pages: PageBytes, kept: KeptPages | None) -> tuple[VirtualStore, VirtualTransferAgent]:
        """The kvstore and the way to it; with `kept`, those of one that outlives this replica."""
        with_it = (self.time, self._rng, self._scenario.store, self._changed)
        if kept is None:
            store = VirtualStore(*with_it)
            return store, VirtualTransferAgent(self.time, self._rng, pages, store)
        tiered = TieredStore(*with_it, kept)
        return tiered, ConnectorAgent(self.time, self._rng, pages, tiered, self._subject.info)

    def _attach(self) -> None:
        """A scheduler attaches to the worker; frames of the stream before are nobody's."""
        spec, run = self._engine.spec, self._engine.epoch
        pages, info = (spec.num_pages,), self._subject.info
        if self._matcher is not None:
            info = replace(info, capabilities=(*info.capabilities, STRUCTURED_OUTPUT))
        hello = WorkerHello(
            run,
            spec.num_slots,
            spec.max_num_seqs,
            pages,
            info,
            capabilities=("cpu",),
            max_row_tokens=spec.max_row_tokens,
            max_constrained_row_tokens=spec.max_constrained_row_tokens,
        )
        self._core = Scheduler(self._config, hello, kvstore=self._scenario.kvstore)
        # So narrow that short answers fill it too.
        self._core._replica.slots.tokens = TokenMatrix(spec.num_slots, self._scenario.token_width)
        grants: DelayLine[bytes] = DelayLine(
            self.time, self._rng, self._scenario.grant_us, lambda frame: self._worker.granted(run, frame)
        )
        reports = DelayLine(self.time, self._rng, self._scenario.report_us, self._reported)
        self._grants = grants
        self._worker.attached(reports.send)

    def _lose_scheduler(self) -> None:
        """The scheduler is gone, its clients' router goes on with the next one."""
        core = self._core
        self._count_core()
        self.events["schedulers lost"] += 1
        self.events["lost in flight"] += len(self._device.in_flight) > 0
        self._clients.collect(core.take_outputs())
        self._clients.collect(core.worker_lost(Unavailable(LOST, "It is gone.", "Go elsewhere."), self.time.now_s))
        self._store.carry_out(core)
        self._engine.begin_run()
        self._attach()
        for place, sequence in self._clients.ask_again():
            self.events["resubmitted"] += 1
            self._submit(place, sequence, attempt=1)

    def _lose_session(self) -> None:
        """A router is gone: nobody listens to its session any more."""
        self._clients.leave(0)
        self.events["left"] += self._core.abort_session(0, self.time.now_s)
        self._changed()

    def _ask(self, place: int) -> None:
        ask, sequence = self._scenario.asks[place], self._clients.ask(place)
        if sequence is None:
            return
        self._submit(place, sequence, attempt=0)
        if ask.abort_us is not None:
            self.time.after(ask.abort_us, lambda: self._abort(place))
        if ask.deadline_us is not None:
            self.time.at(ask.at_us + ask.deadline_us + 1, self._changed)

    def _ask_after(self, place: int) -> None:
        """The next turn of a conversation comes a while after the end of the one before."""
        ask = self._scenario.asks[place]
        if self._clients.over(cast("int", ask.follows)):
            self.time.after(ask.at_us, lambda: self._ask(place))
        else:
            self.time.after(_LOOK_AGAIN_US, lambda: self._ask_after(place))

    def _submit(self, place: int, sequence: Sequence, attempt: int) -> None:
        ask = self._scenario.asks[place]
        context = RequestContext(f"r{place}", attempt, ask.tenant, _deadline_s(ask), ask.priority)
        try:
            self._core.submit(ask.session, place, context, sequence, self.time.now_s)
        except QuireError as error:
            self._clients.refused(place, error.code)
        self._changed()

    def _abort(self, place: int) -> None:
        if self._core.abort(self._scenario.asks[place].session, place, self.time.now_s):
            self.events["aborted"] += 1
            self._changed()

    def _reported(self, frame: bytes) -> None:
        report = decode_report(worker_pb2.Report.FromString(frame))
        # As long as steps take here, which is not how long it took to pretend.
        report.timing = [StepTiming(0, 0, self._scenario.step_us[1], 0, 0)] * report.steps
        self._watch(report)
        self._clients.collect(self._core.on_report(report, self.time.now_s))
        self._changed()

    def _changed(self) -> None:
        """Make Grants soon: the scheduler's loop, too, may be slow to notice."""
        self._store.carry_out(self._core)
        if not self._pump_due:
            self._pump_due = True
            self.time.after(int(self._rng.integers(0, self._scenario.think_us + 1)), self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        while (grant := self._core.next_grant(self.time.now_s)) is not None:
            if self._rights is not None:
                for start in grant.start:
                    self._rights.granted(int(start.context.request_id[1:]), start)
            self._grants.send(encode_grant(grant).SerializeToString())
            self._store.carry_out(self._core)
        self._store.carry_out(self._core)
        self._clients.collect(self._core.take_outputs())
        if self._rng.random() < 0.1:
            self._core.check_integrity()
            self.check_named()

    def _watch(self, report: Report) -> None:
        """Count rows that come late: of a sequence that no longer holds its slot."""
        slots = self._core._replica.slots
        if report.epoch != self._core.hello.epoch:
            self.events["reports of another epoch"] += 1
            return
        applied = np.repeat(report.step_applied, report.step_rows)
        late = ~(slots.active[report.slot] & (slots.start_seq[report.slot] <= applied))
        self.events["late rows"] += int(late.sum())
        self.events["late ends"] += int((late & (report.finish > 0)).sum())

    def _inventory(self) -> None:
        """Nothing is left: no request, no step, no page, no lease."""
        core = self._core
        self._engine.check_integrity()
        core.check_integrity()
        assert not self._clients.unheard(), f"stuck: {self._clients.unheard()} never ended; {core.load()}"
        assert core.quiet, "the core is not quiet"
        load = core.load()
        assert load.free_pages == load.pages and not load.referenced_pages, f"pages are kept: {load}"
        assert core.names.num_named == core.cached_pages, "names are kept of pages that are not"
        assert self._scenario.prefix_cache or not core.cached_pages, "pages are kept though nobody may find them"
        self.check_named()
        self._store.check_integrity()
        assert self._matcher is None or not self._matcher.sequences, "a mask slot is kept"
        assert not self._device.in_flight and not self._engine.residents.table.started(), "the worker still works"

    def check_named(self) -> None:
        """What has a name is whole on the worker."""
        ready = self._engine.residents.states.ready
        for page in self._core.names.pages(0).values():
            assert ready[page] == self._engine.spec.page_size, f"page {page} has a name and is not whole"

    def _count(self) -> None:
        self._count_core()
        self.events["siblings"] += sum(ask.sampling.sample > 0 for ask in self._scenario.asks)
        self.events["failed moves"] += self._transfer_agent.failed
        self.events.update(self._store.events)
        self.events.update(self._device.events)
        self.events["requests"] += len(self._clients.heard)
        self.events["constrained"] += sum(sequence.constraint is not None for sequence in self._sequences.values())
        self.events["continued"] += sum(len(sequence.output_ids) > 0 for sequence in self._sequences.values())
        ends = [heard.end for heard in self._clients.heard.values()]
        self.events["deadlines exceeded"] += ends.count("DEADLINE_EXCEEDED")

    def _count_core(self) -> None:
        stats = self._core.stats
        self.events["preemptions"] += stats.preemptions
        self.events["reclaims"] += stats.reclaims
        self.events["pages lost"] += stats.pages_lost
        self.events["late tokens"] += stats.late_tokens
        self.events["swaps"] += stats.swaps
        self.events["pages offloaded"] += stats.offload_pages
        self.events["pages not offloaded"] += stats.offload_dropped + stats.offload_missed
        self.events["grants"] += stats.grants
        self.events["local hits"] += stats.prefix_hits


def num_pages(subject: Subject, scenario: Scenario) -> int:
    """Page 0, enough for the largest request, and some to spare."""
    size = subject.scale.page_size
    return 1 + -(-min(longest(scenario.asks), subject.scale.max_model_len) // size) + scenario.spare_pages


def a_sequence(ask: Ask, subject: Subject, said: np.ndarray | None = None) -> Sequence:
    """What the client asks for, where so much was said before."""
    stop = Stop(ask.max_tokens, ask.min_tokens, ask.stop_token_ids, ask.ignore_eos, ask.repetition)
    prompt = ask.prompt(subject.scale, said)
    return Sequence(
        prompt,
        stop,
        ask.sampling,
        cache_salt=ask.cache_salt,
        skip_cache_read=ask.skip_cache_read,
        thinking=ask.thinking,
        constraint=Constraint.of(ask.grammar) if ask.grammar else None,
    )


def _deadline_s(ask: Ask) -> float:
    """On the scheduler's clock."""
    return math.inf if ask.deadline_us is None else BEGIN_S + (ask.at_us + ask.deadline_us) / 1e6


def _config(scenario: Scenario, *, lockstep: bool) -> SchedulerConfig:
    return SchedulerConfig(
        scheduling_policy=scenario.policy,
        max_num_batched_tokens=scenario.tokens_per_step,
        long_prefill_token_threshold=scenario.chunk,
        max_num_partial_prefills=scenario.partial,
        prefill_tokens_beside_decoders=scenario.beside,
        max_num_seqs=scenario.rows,
        enable_prefix_caching=scenario.prefix_cache,
        kvstore_offload=scenario.offload,
        lockstep=lockstep,
    )
