"""Migration: submits every sequence to an engine, and to another engine when the first one is lost. The sequence
continues there with all its tokens, under a new handle and a new attempt number.

If another replica should compute the prompt, the sequence begins with a Handoff. When the prompt is computed, this
module moves the sequence to the decode side.

If no replica can take a sequence, the sequence waits. It fails after it was without an engine for `--migration-wait-s`,
counted since its last token. A request is not passed on if `--migration-limit` of the engines that it has lost since
its last token count against it (see poison_detection.py).

This module knows nothing of streams. sequences/engine_failure.py interprets the failures of engines, and placement/
chooses the best replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire_common.telemetry import tracing
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.kv_transfer.handoff import Handoff
from quire_router.replicas.fleet import no_replica
from quire_router.sequences.engine_failure import session_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.config import RouterConfig
    from quire_router.kv_transfer.transfers import Transfers
    from quire_router.replicas.chooser import Chooser
    from quire_router.replicas.pending_sequences import PendingSequences
    from quire_router.replicas.replica import Replica
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.handles import HandleCounter
    from quire_router.sequences.migration_history import MigrationHistory
    from quire_router.sequences.sequence_state import SequenceState

log = get_logger(__name__)


class Migration:
    """One per process; all methods run in the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        chooser: Chooser,
        handles: HandleCounter,
        pending: PendingSequences,
        transfers: Transfers,
    ) -> None:
        self._wait_s = config.migration_wait_s
        self._limit = config.migration_limit
        self._chooser = chooser
        self._handles = handles
        self._pending = pending
        self._transfers = transfers
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        self._closed = False

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Submit new siblings (the sequences of one prompt) to one replica, because they share their prompt's pages;
        the placement of the first counts for all. A sequence without siblings may be prefilled at another replica than
        the one that decodes it. If no replica can take the sequences, they wait. After `close`, they fail."""
        if self._closed:
            for sequence in sequences:
                sequence.fail(session_lost())
            return
        if len(sequences) == 1 and _may_prefill_elsewhere(sequences[0]):
            if not self._submit_new(sequences[0]):
                self._wait(sequences[0], self._history_of(sequences[0]))
            return
        replica = self._chooser.choose(sequences[0], len(sequences))
        if replica is not None:
            for sequence in sequences:
                sequence.placement.share_held_tokens(sequences[0].held_tokens)
                self._submit(sequence, replica)
            return
        for sequence in sequences:
            self._wait(sequence, self._history_of(sequence))

    def lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """Find another engine for a sequence whose engine was lost or has dropped it, or let the sequence wait for an
        engine. The decode side that a hand-off has reserved comes first. The sequence fails if it has lost too many
        engines, if no engine has run it and all replicas are full, or if this router is closing. Unless the router
        closes, a sequence that has all its tokens needs no engine, and only waits for their text. A sequence that has
        ended is ignored.

        A refusal before any engine had admitted the sequence does not count as a lost engine. An engine that has
        refused is not asked again for a while.
        """
        if sequence.client.ended:
            return
        if self._closed:
            sequence.fail(session_lost())
            return
        sequence.close_attempt()
        if sequence.engine.finish:
            self._pending.enter(sequence)
            return
        history = self._history_of(sequence)
        history.note_progress(len(sequence.engine.output_ids), self._wait_s)
        history.leave_engine(failure.instance)
        if failure.refused and not sequence.admitted_once:
            # No engine had begun to run the sequence, so it has lost none.
            log.debug("sequence refused", **_log_fields(sequence, failure))
        else:
            history.lose_engine(failure.reason)
            log.warning("sequence lost its engine", emitted=sequence.engine.tokens, **_log_fields(sequence, failure))
        if self._gives_up(sequence, history, failure):
            return
        self._shun(history, failure)
        instance = sequence.kv.route.take_over() if sequence.kv.route is not None else ""
        if instance and history.lost_ns:
            _record_migration(sequence, history, instance)
        if not instance:
            self._place_or_wait(sequence)

    def prefill_ended(self, sequence: SequenceState) -> None:
        """Move a sequence whose prompt is computed to its reserved decode side. If it has no reservation, submit it to
        any replica, or let it wait; after `close`, fail it. If the engine has ended the sequence, it only waits for its
        text."""
        sequence.close_attempt()
        if sequence.engine.finish:
            self._pending.enter(sequence)
        elif sequence.kv.route is None or not sequence.kv.route.take_over():
            self._place_or_wait(sequence)

    def reservation_lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """Record that the sequence's decode side was lost before the first token. The sequence goes on at its prefill
        side, but fails if it has lost too many engines, or if no engine has run it and all replicas are full. A replica
        that has refused the reservation is not asked again for a while."""
        history = self._history_of(sequence)
        history.leave_engine(failure.instance)
        log.info("decode side lost ahead of the first token", **_log_fields(sequence, failure))
        if not sequence.client.ended and not self._gives_up(sequence, history, failure):
            self._shun(history, failure)

    def replicas_changed(self) -> None:
        """Try to place the sequences that wait, since a replica may be able to take them now."""
        if self._pending.waiting:
            self._serve_waiting()

    def close(self) -> None:
        """Fail the sequences that wait for an engine now, and each sequence that starts or loses its engine later. A
        sequence whose prefill ends later still goes to its reserved decode side, and fails without one."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for sequence in list(self._pending.waiting.values()):
            self._pending.leave(sequence)
            sequence.fail(session_lost())

    def _gives_up(self, sequence: SequenceState, history: MigrationHistory, failure: EngineFailure) -> bool:
        """Record the failure with the sequence's poison detection, and fail the sequence if it has lost too many
        engines since its last token (see `PoisonDetector.verdict`). If this failure says that its replica is full, and
        no engine has run the sequence yet, record in the history that the replica was full. Then also fail the
        sequence, with the failure's error, if no other replica could take it now, except those that were full too.
        Returns whether the sequence has failed."""
        epoch = self._chooser.epoch_of(failure.instance)
        error = history.poison.verdict(sequence.engine, failure, epoch, self._chooser.still_runs, self._limit)
        if error is not None:
            sequence.fail(error)
            return True
        if failure.busy and not sequence.admitted_once:
            # A new request gets an error at once when all replicas are full. Only a sequence that has begun waits.
            history.busy.add(failure.instance)
            if all(replica.instance in history.busy for replica in self._chooser.accepting(sequence)):
                sequence.fail(failure.error)
                return True
        return False

    def _shun(self, history: MigrationHistory, failure: EngineFailure) -> None:
        """If the failure is a refusal, do not ask that replica again for a while."""
        if failure.refused:
            history.shun(failure.instance, asyncio.get_running_loop().time())

    def _submit_new(self, sequence: SequenceState) -> bool:
        """Submit a new sequence to the one replica that placement chooses. If placement chooses two, submit the
        sequence to the prefill side, and reserve a place at the decode side. Returns False if no replica can take it
        now."""
        sides = self._chooser.choose_sides(sequence)
        if sides is None:
            return False
        if sides.prefill is None:
            self._submit(sequence, sides.decode)
            return True
        handoff = Handoff(sequence, sides.prefill.session, self._transfers, self)
        sequence.kv.begin_route(handoff)
        self._submit(sequence, sides.prefill)
        handoff.reserve(
            sides.decode.session, self._handles.next_handle(offsets=sequence.wants_logprobs), sides.decode_load
        )
        return True

    def _place_or_wait(self, sequence: SequenceState) -> None:
        """Submit the sequence to a replica that can take it now, or let it wait. After `close`, fail it."""
        if self._closed:
            sequence.fail(session_lost())
            return
        history = self._history_of(sequence)
        if not self._place(sequence, history, asyncio.get_running_loop().time()):
            self._wait(sequence, history)

    def _place(self, sequence: SequenceState, history: MigrationHistory, now_s: float) -> bool:
        """Submit the sequence to a replica that can take it now. A new sequence without siblings may be split between a
        prefill and a decode side (see `_may_prefill_elsewhere`). For all other sequences, replicas that refused the
        sequence lately are left out. The replica that the sequence left last is taken only if no other can take the
        sequence. Returns False if no replica can take the sequence now."""
        if _may_prefill_elsewhere(sequence):
            return self._submit_new(sequence)
        replica = self._chooser.choose(sequence, shunned=history.shunned_at(now_s), avoid=history.avoid)
        if replica is None:
            return False
        self._submit(sequence, replica)
        return True

    def _submit(self, sequence: SequenceState, replica: Replica) -> None:
        """Submit the sequence to this replica, and end its wait if it has waited. If the sequence was submitted before,
        this is another attempt under a new handle. Records a migration if the sequence had lost an engine. The move to
        a reserved decode side does not use this method (see `Handoff.take_over`)."""
        history = sequence.migration_history
        self._pending.leave(sequence)
        if sequence.submitted:
            sequence.begin_attempt(self._handles.next_handle(offsets=sequence.wants_logprobs))
        replica.submit(sequence)
        if history is not None and history.lost_ns:
            _record_migration(sequence, history, replica.instance)

    def _wait(self, sequence: SequenceState, history: MigrationHistory) -> None:
        """Let the sequence wait for a replica, and set the timer for the next try. Its text is decoded meanwhile."""
        now_s = asyncio.get_running_loop().time()
        history.begin_wait(now_s)
        self._pending.enter(sequence)
        self._wake_at(history.next_due_s(now_s))

    def _serve_waiting(self) -> None:
        """Try to place each sequence that waits. Fail those that cannot be placed and have waited `--migration-wait-s`
        in all since their last token, and set the timer for the next try."""
        self._due_s = float("inf")
        now_s = asyncio.get_running_loop().time()
        for sequence in list(self._pending.waiting.values()):
            history = self._history_of(sequence)
            history.count_wait(now_s)
            if self._place(sequence, history, now_s):
                continue
            if history.wait_left_s <= 0:
                self._pending.leave(sequence)
                sequence.fail(no_replica())
                continue
            self._wake_at(history.next_due_s(now_s))

    def _wake_at(self, due_s: float) -> None:
        """Set the timer so that `_serve_waiting` is called at `due_s` or earlier. A timer that is due earlier stays."""
        if due_s >= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._serve_waiting)

    def _history_of(self, sequence: SequenceState) -> MigrationHistory:
        return sequence.begin_history(self._wait_s)


def _may_prefill_elsewhere(sequence: SequenceState) -> bool:
    """Whether one replica may prefill the sequence and another decode it. The sequence must be new, have no KV route
    and no siblings, and have more than one token to get. It must not ask for prompt logprobs, because one engine must
    compute the whole prompt for them."""
    spec = sequence.spec
    left = spec.stop.max_tokens - sequence.engine.tokens
    alone = sequence.job.siblings == 1
    new = not sequence.submitted and sequence.kv.route is None
    return new and alone and left > 1 and spec.sampling.prompt_logprobs < 0


def _log_fields(sequence: SequenceState, failure: EngineFailure) -> dict[str, str | int]:
    """Return the fields with which a log line names a sequence and its engine's failure."""
    return {
        "request_id": sequence.context.request_id,
        "index": sequence.index,
        "attempt": sequence.attempt,
        "instance": failure.instance,
        "reason": failure.reason,
    }


def _record_migration(sequence: SequenceState, history: MigrationHistory, instance: str) -> None:
    """Record in the log, the metrics and the trace that a sequence has lost its engine and was sent to `instance`. The
    history counts the migration, and the sequence no longer counts as without an engine."""
    us = history.find_engine()
    metrics.migrations.labels(history.reason).inc()
    metrics.migration_wait.observe(us / 1e6)
    fields: dict[str, str | int] = {"attempt": sequence.attempt, "instance": instance, "reason": history.reason}
    log.info(
        "sequence goes on",
        request_id=sequence.context.request_id,
        index=sequence.index,
        after_ms=us // 1000,
        emitted=sequence.engine.tokens,
        **fields,
    )
    if tracing.enabled():
        context = sequence.context
        parent = tracing.extract_headers({"traceparent": context.traceparent, "tracestate": context.tracestate})
        end_ns = time.time_ns()
        attributes = {f"quire.{name}": value for name, value in fields.items()}
        history.add_event(end_ns, attributes)
        tracing.record_span("router.migrate", parent, end_ns - us * 1000, end_ns, attributes)
