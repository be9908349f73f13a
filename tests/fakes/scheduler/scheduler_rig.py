"""A scheduler core and a fake worker in one thread, with a kvstore that is a dictionary."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from quire_common.credit import Grant, Report
from quire_common.errors import QuireError
from quire_common.finish import FinishReason
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_common.ticket import KvTransfer, Ticket
from quire_scheduler.batching.grant_policy import GrantPolicy
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.outputs import FinishedNote, PulledNote, SessionOutputs
from quire_scheduler.core.scheduler import Scheduler
from quire_scheduler.disaggregation.handover import NO_TRANSFER, Handover
from quire_scheduler.kv.kv_traffic import Lookup, LookupResult
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed

T = TypeVar("T")


def a_sequence(prompt: Any, max_tokens: int = 8, *, ignore_eos: bool = True, **more: Any) -> Sequence:
    """A prompt of given ids, or of so many counted ones."""
    ids = np.arange(2, 2 + prompt) % 90 + 2 if isinstance(prompt, int) else np.asarray(prompt)
    sampling = Sampling(logprobs=more.pop("logprobs", -1))
    stop = Stop(max_tokens, more.pop("min_tokens", 0), more.pop("stop_token_ids", ()), ignore_eos)
    return Sequence(ids.astype(np.int32), stop, sampling, **more)


def random_ids(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 97, tokens)


class Delayed(Generic[T]):
    """A wire: frames arrive in order, each some turns after it was sent, and never before the one ahead of it."""

    def __init__(self, delay: Callable[[], int]) -> None:
        self._delay = delay
        self._turn = 0
        self._frames: deque[tuple[int, T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, frame: T) -> None:
        self._frames.append((self._turn + self._delay(), frame))

    def due(self) -> list[T]:
        frames = []
        while self._frames and self._frames[0][0] <= self._turn:
            frames.append(self._frames.popleft()[1])
        self._turn += 1
        return frames


class Rig:
    """Submits, drives and collects; `now` counts a millisecond per step."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        kvstore: bool = False,
        policy: GrantPolicy | None = None,
        worker: FakeWorker | None = None,
        grant_delay: Callable[[], int] = lambda: 0,
        report_delay: Callable[[], int] = lambda: 0,
        **hello: Any,
    ) -> None:
        self.worker = worker or FakeWorker(make_hello(**hello))
        self.core = Scheduler(config or SchedulerConfig(), self.worker.hello, policy, kvstore=kvstore)
        self.now = 1_000_000.0
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.ends: dict[tuple[int, int], FinishReason] = {}
        self.notes: dict[tuple[int, int], FinishedNote] = {}
        self.errors: dict[tuple[int, int], QuireError] = {}
        self.admitted: list[tuple[int, int]] = []
        # Of requests that were prefilled for others: tickets, and who is done.
        self.tickets: dict[tuple[int, int], Ticket] = {}
        self.prefilled: list[tuple[int, int]] = []
        self.pulled: dict[tuple[int, int], PulledNote] = {}
        self.order: list[tuple[int, int]] = []
        self.leases: set[bytes] = set()
        self.released: list[bytes] = []
        # Turns that a lookup takes, whether it comes to nothing, and those that were answered.
        self.lookup_turns, self.lookups_fail = 0, False
        self.looked_up: list[Lookup] = []
        self._lookups: list[tuple[int, Lookup]] = []
        self._turn = 0
        self._next_lease = 0
        # Of the kvstore.
        self.boot_id, self.watched = 1, False
        self._grants: Delayed[Grant] = Delayed(grant_delay)
        self._reports: Delayed[Report] = Delayed(report_delay)

    def submit(
        self,
        handle: int,
        sequence: Sequence,
        *,
        session: int = 0,
        transfer: KvTransfer = NO_TRANSFER,
        held_tokens: int | None = None,
        **context: Any,
    ) -> None:
        context.setdefault("request_id", f"r{session}.{handle}")
        self.core.submit(session, handle, RequestContext(**context), sequence, self.now, transfer, held_tokens)

    def hand_over(self, handle: int, *tokens: int, session: int = 0, **what: Any) -> None:
        self.core.hand_over(session, handle, Handover(tokens=tokens, **what), self.now)

    def step_until(self, holds: Callable[[], bool], most: int = 500) -> None:
        for _ in range(most):
            if holds():
                return
            self.step()
        raise AssertionError("it never came to that")

    def step(self) -> bool:
        """One turn; False where nothing moved."""
        self.now += 0.001
        self._turn += 1
        moved = self._effects()
        while grant := self.core.next_grant(self.now):
            self._grants.put(grant)
            moved = True
        moved |= self._effects()
        for grant in self._grants.due():
            self.worker.deliver(grant)
        report = self.worker.step()
        if report is not None:
            self._reports.put(report)
            moved = True
        for report in self._reports.due():
            self.collect(self.core.on_report(report, self.now))
            # What is granted between two Reports is made from the first alone.
            while grant := self.core.next_grant(self.now):
                self._grants.put(grant)
            moved = True
        self.collect(self.core.take_outputs())
        return moved or bool(self._grants or self._reports)

    def run(self, most: int = 20_000) -> None:
        """Until nothing waits, runs or moves."""
        still = 0
        for _ in range(most):
            still = 0 if self.step() else still + 1
            if self.core.quiet and still > 5:
                break
            # Moves take up to four boundaries without a report.
            assert still < 20, f"stuck: {self.core.load()}"
        assert self.core.quiet, "did not finish"
        self.core.check_integrity()
        assert self.core.load().referenced_pages == 0
        assert self.leases == set(), "a lease was kept"
        assert len(self.released) == len(set(self.released)), "a lease was released twice"

    def collect(self, outputs: list[SessionOutputs]) -> None:
        for out in outputs:
            at = 0
            handles = out.handle.tolist()
            ends = np.cumsum(out.count)
            for handle, count, finish in zip(handles, out.count.tolist(), out.finish.tolist(), strict=True):
                key = (out.session, handle)
                over = key in self.ends or key in self.errors or key in self.prefilled
                assert not over, "a row after the end"
                self.tokens[key] += out.token[at : at + count].tolist()
                self.order += [key] * count
                at += count
                if finish:
                    self.ends[key] = FinishReason(finish)
            assert at == len(out.token)
            if out.logprobs is not None:
                for index, value in zip(out.logprobs.token_index.tolist(), out.logprobs.logprob.tolist(), strict=True):
                    assert out.token[index] == -value
                    row = int(np.searchsorted(ends, index, side="right"))
                    self.logprobs[out.session, handles[row]].append(value)
            for note in out.finished:
                self.notes[out.session, note.handle] = note
                assert (out.session, note.handle) in self.ends
            self.admitted += [(out.session, note.handle) for note in out.admitted]
            self.tickets |= {(out.session, note.handle): note.ticket for note in out.admitted if note.ticket}
            self.prefilled += [(out.session, note.handle) for note in out.prefilled]
            for pulled in out.pulled:
                assert (out.session, pulled.handle) not in self.pulled, "a pull was told of twice"
                self.pulled[out.session, pulled.handle] = pulled
            for failed in out.failed:
                self.errors[out.session, failed.handle] = failed.error

    def _effects(self) -> bool:
        effects = self.core.take_effects()
        self._lookups += [(self._turn + self.lookup_turns, lookup) for lookup in effects.lookups]
        due = [lookup for turn, lookup in self._lookups if turn <= self._turn]
        self._lookups = [entry for entry in self._lookups if entry[0] > self._turn]
        for lookup in due:
            self.looked_up.append(lookup)
            self.core.on_lookup(lookup.uid, self._answer(lookup))
        for lease in [*effects.releases, *self.core.take_effects().releases]:
            self.leases.discard(lease)
            self.released.append(lease)
        return bool(effects.lookups or effects.releases or self._lookups)

    def _answer(self, lookup: Lookup) -> LookupResult:
        if self.lookups_fail:
            return LookupResult(0, (), 50_000, 0.0, failed=True)
        groups = len(self.worker.hello.num_pages)
        found = 0
        for digest in lookup.hashes:
            if not all(bytes([g]) + digest in self.worker.store for g in range(groups)):
                break
            found += 1
        leases = []
        for _ in range(groups):
            self._next_lease += 1
            leases.append(self._next_lease.to_bytes(8, "big"))
        self.leases.update(leases)
        return LookupResult(found, tuple(leases), 50, self.now + 60.0, boot_id=self.boot_id, watched=self.watched)


def serve_alone(rig: Rig, handle: int, sequence: Sequence) -> int:
    """Serve a sequence alone, and check its tokens. Returns how many tokens were prefilled for it."""
    before = rig.core.stats.prefill_tokens
    rig.submit(handle, sequence)
    rig.run()
    assert rig.tokens[0, handle] == undisturbed(sequence, max_len=rig.core.max_len)[0][len(sequence.output_ids) :]
    return rig.core.stats.prefill_tokens - before
