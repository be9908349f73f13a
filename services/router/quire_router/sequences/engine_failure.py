"""Decides what the failure of an engine means for a sequence: whether another engine may continue the sequence, and
whether the sequence is suspected to have caused the failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import Internal, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.errors import QuireError

SESSION_TOO_SLOW = "SESSION_TOO_SLOW"
_RETRY_AFTER_S = 1.0
# With these codes the engine refused the request before it ran, or an operator drained the engine. So the request is
# not suspected.
_REFUSALS = {"DRAINING": "draining", "WORKER_NOT_READY": "not_ready"}
_FAILURES = {"WORKER_LOST": "worker_lost", "PAGES_LOST": "pages_lost", SESSION_TOO_SLOW: "too_slow"}
# These codes look like errors of the request, but they show that the engine's own state of slots and pages is wrong.
_CONFUSIONS = ("PAGE_TAKEN", "SLOT_BUSY")


class Progress(Protocol):
    """The part of a sequence's engine progress that this module reads."""

    output_ids: bytearray


class Outage:
    """The failure of an engine, and the sequences that ran there then. If most of these sequences go on elsewhere, and
    one of them loses further engines, this one is probably the cause."""

    __slots__ = ("_ran", "kind")

    def __init__(self, kind: str, ran: Iterable[Progress] = ()) -> None:
        self.kind = kind
        self._ran = [(each, len(each.output_ids)) for each in ran]

    def most_progressed(self, suspect: Progress) -> bool:
        """Whether at least half of the other sequences that ran at the failed engine have got tokens since. True if no
        other sequence ran there."""
        others = [len(each.output_ids) > known for each, known in self._ran if each is not suspect]
        return 2 * sum(others) >= len(others)


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The failure of an engine, for one sequence. `reason` is a label for metrics. The client gets `error` if no other
    engine takes the sequence.

    `suspect`: the sequence ran at the engine and may have caused the failure. `bystander`: the sequence only waited
    there when all sequences that ran there were lost. `unreachable`: the connection was lost, so the engine may still
    run. `refused`: the replica refused the sequence, and would refuse it again now. `busy`: the replica refused it
    because it is full. `outage`: for a suspect, the failure and the sequences that ran there.
    """

    reason: str
    instance: str
    error: QuireError
    suspect: bool = False
    bystander: bool = False
    unreachable: bool = False
    refused: bool = False
    busy: bool = False
    outage: Outage = field(default_factory=lambda: Outage(""))


def failure_of(
    instance: str, error: QuireError, *, admitted: bool, outage: Outage | None = None
) -> EngineFailure | None:
    """Convert a scheduler's error about a sequence to a failure, after which another engine may take the sequence.
    Returns None if the request itself is at fault. A refusal (draining, not ready, full) is no suspicion. If the worker
    or its pages were lost, an admitted sequence is a suspect, and any other a bystander. After another Unavailable, an
    admitted sequence is a suspect, and any other counts as refused. An internal error, or one that shows wrong slots or
    pages, makes any sequence a suspect. A session that was too slow makes none.

    `admitted`: the worker had begun to run the sequence. `outage` covers all sequences that failed together; None: the
    sequence failed alone, as after an internal error in any case.
    """
    outage = outage or Outage(error.code)
    if error.code in _REFUSALS:
        return EngineFailure(_REFUSALS[error.code], instance, error, refused=True)
    if error.code in _FAILURES:
        deadly = error.code != SESSION_TOO_SLOW
        reason = _FAILURES[error.code]
        suspect, bystander = admitted and deadly, deadly and not admitted
        return EngineFailure(reason, instance, error, suspect=suspect, bystander=bystander, outage=outage)
    if isinstance(error, Overloaded):
        return EngineFailure("full", instance, error, refused=True, busy=True)
    if isinstance(error, Unavailable):
        return EngineFailure("unavailable", instance, error, suspect=admitted, refused=not admitted, outage=outage)
    if error.code in _CONFUSIONS:
        error = Internal(error.code, error.message, error.fix)
    if isinstance(error, Internal):
        return EngineFailure("failed", instance, error, suspect=True, outage=Outage(error.code))
    return None


def not_a_prefill(instance: str) -> EngineFailure:
    """Make the failure of an engine that ended a sequence after the prefill, though it should have decoded. The
    sequence is a suspect."""
    error = Internal("NOT_A_PREFILL", "The engine ended a request early.", "Report it with the scheduler's log.")
    return EngineFailure("failed", instance, error, suspect=True)


def session_lost() -> Unavailable:
    """Make the error (Unavailable, SCHEDULER_LOST, retry after a second) of a request whose scheduler went away."""
    return Unavailable(
        "SCHEDULER_LOST",
        "The engine that ran this request went away.",
        "Retry the request; see the router's log for the instance.",
        retry_after_s=_RETRY_AFTER_S,
    )
