"""The operator's view of the requests that run, and of the last requests that ended while an operator watched.

The view has lengths, times and replicas, but no content: no prompt, no text and no token leaves this module.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import Aborted, NotFound
from quire_router.replicas.pending_sequences import PendingSequences
from quire_router.requests.waterfall import unfinished, waterfall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_router.requests.generation import Generation
    from quire_router.requests.waterfall import Hop
    from quire_router.sequences.delta import Usage
    from quire_router.sequences.sequence_placement import Run
    from quire_router.sequences.sequence_state import SequenceState

_MOST_RECENT = 24
# Sums are kept for so many replicas. If a request ends at a further replica, the sums that changed longest ago are
# dropped.
_MOST_INSTANCES = 512
# States, those nearest to trouble first: a request of several sequences is shown in the first of their states.
WAITING, QUEUED, PREFILL, DECODING, FINISHING, ENDED = STATES = (
    "waiting for a replica",
    "queued",
    "prefill",
    "decoding",
    "finishing",
    "ended",
)


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request at one moment. `number` identifies it in this process. Times are in milliseconds since the request's
    arrival; `first_token_ms` is 0 until there is a token. `attempts` is the largest number of attempts that one of its
    sequences had, lost reservations included. `runs` are the runs of the first sequence, and `hops` are the bars of the
    time line, for all sequences together."""

    number: int
    request_id: str
    tenant: str
    model: str
    state: str
    age_ms: float
    first_token_ms: float
    sequences: int
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    runs: tuple[Run, ...]
    hops: tuple[Hop, ...]


@dataclass(slots=True)
class InstanceSums:
    """Sums over the requests that ended at one replica."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Add a request that has ended."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens


class LiveGenerations:
    """The requests of this process; all methods run in the event loop. Each step of a beam search counts as a request.
    `sums` has the sums of ended requests, by replica."""

    def __init__(self) -> None:
        self.sums: dict[str, InstanceSums] = {}
        self.recent: deque[LiveRequest] = deque(maxlen=_MOST_RECENT)
        self._watched = False
        self._numbers = itertools.count(1)
        # The number of each running generation, in the order in which they started.
        self._running: dict[Generation, int] = {}

    def __len__(self) -> int:
        return len(self._running)

    def watch(self, *, watched: bool) -> None:
        """With `watched`, keep the last requests that end from now on in `recent`. Without it, keep no ended requests,
        and empty `recent`."""
        self._watched = watched
        if not watched:
            self.recent.clear()

    def enter(self, generation: Generation) -> None:
        """Add a generation whose sequences have been submitted."""
        self._running[generation] = next(self._numbers)

    def leave(self, generation: Generation, usage: Usage) -> None:
        """Remove a generation that has ended; `usage` has its tokens. Add them to the sums of the replica to
        which its first sequence was sent last, if it was sent to any, and keep the generation in `recent` while an
        operator watches. Sums are kept for 512 replicas; beyond, those that changed longest ago are dropped.
        Idempotent."""
        number = self._running.pop(generation, None)
        if number is None:
            return
        runs = generation.sequences[0].placement.runs
        if runs:
            sums = self.sums.pop(runs[-1].instance, None) or InstanceSums()
            sums.add(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            self.sums[runs[-1].instance] = sums
            if len(self.sums) > _MOST_INSTANCES:
                del self.sums[next(iter(self.sums))]
        if self._watched:
            self.recent.append(_seen(number, generation, time.monotonic_ns(), running=False))

    def oldest(self, most: int) -> list[LiveRequest]:
        """Return the requests that have run longest, `most` at most."""
        now_ns = time.monotonic_ns()
        running = itertools.islice(self._running.items(), most)
        return [_seen(number, generation, now_ns, running=True) for generation, number in running]

    def by_tenant(self) -> Counter[str]:
        """Return the number of running requests of each tenant."""
        return Counter(generation.caller.tenant for generation in self._running)

    def cancel(self, number: int, request_id: str) -> None:
        """Abort a running request for the operator; a streaming client gets the output so far, then the error Aborted;
        any other client gets only the error. Raises NotFound if no request with this number and this id runs in this
        process."""
        generation = next((one for one, its_number in self._running.items() if its_number == number), None)
        if generation is None or generation.caller.request_id != request_id:
            raise NotFound(
                "NO_SUCH_REQUEST",
                "This router process runs no such request.",
                "It may have ended. With several router processes, ask the one that runs it.",
            )
        generation.cancel(
            Aborted("CANCELLED_BY_OPERATOR", "An operator has ended this request.", "Ask the operator for the reason.")
        )


def _seen(number: int, generation: Generation, now_ns: int, *, running: bool) -> LiveRequest:
    """Describe a generation at `now_ns`: its age, state, token counts, replicas and time line. A running one has only
    the phases that the router recorded at its start, the wait and the decoding; an ended one has the timings of all
    services."""
    sequences, usage = generation.sequences, generation.usage()
    age_ms = (now_ns - generation.arrived_ns) / 1e6
    first_ns = min((s.engine.first_token_ns for s in sequences if s.engine.first_token_ns), default=0)
    first_ms = (first_ns - generation.arrived_ns) / 1e6 if first_ns else 0.0
    runs = sequences[0].placement.runs
    if running:
        hops = unfinished(generation.router_timings, first_ms, age_ms, runs[-1].instance if runs else "")
    else:
        hops = waterfall(generation.timings(), first_ms, age_ms)
    return LiveRequest(
        number=number,
        request_id=generation.caller.request_id,
        tenant=generation.caller.tenant,
        model=generation.served.name,
        state=_state(sequences) if running else ENDED,
        age_ms=age_ms,
        first_token_ms=first_ms,
        sequences=len(sequences),
        attempts=max(sequence.attempt for sequence in sequences) + 1,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=sum(sequence.engine.tokens for sequence in sequences),
        max_tokens=sum(sequence.spec.stop.max_tokens for sequence in sequences),
        runs=runs,
        hops=tuple(hops),
    )


def _state(sequences: Iterable[SequenceState]) -> str:
    """Return the state of a request: of its sequences' states, the one that comes first in STATES."""
    return min(map(_state_of, sequences), key=STATES.index)


def _state_of(sequence: SequenceState) -> str:
    """Return the state of one sequence. FINISHING: all its tokens have come, or it has ended for its client. WAITING:
    it has no replica. QUEUED: its engine has not admitted it. Then PREFILL until it has a token, and DECODING; tokens
    of earlier attempts and of a stream that the client resumes count."""
    if sequence.client.ended or sequence.engine.finish:
        return FINISHING
    if isinstance(sequence.holder, PendingSequences):
        return WAITING
    if not sequence.admitted:
        return QUEUED
    return DECODING if sequence.engine.tokens else PREFILL
