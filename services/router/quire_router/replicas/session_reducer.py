"""Applies the messages of a scheduler to the sequences and reservations of its session. Only this module writes the
sequences' EngineProgress from an engine's messages. This module knows neither protobuf nor the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router import metrics
from quire_router.sequences.engine_failure import EngineFailure, Outage, failure_of, not_a_prefill, session_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quire_common.errors import QuireError
    from quire_router.kv_transfer.reservation import Reservation
    from quire_router.placement.replica_table import ReplicaRow
    from quire_router.replicas.session_step import Admitted, Failed, Finished, Prefilled, Pulled, SessionStep, StepRows
    from quire_router.sequences.kv_route import TransferSource
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.text.detokenize_stream import DetokenizeStream

# Reasons for a session's end that a running request may have caused.
_SUSPECT = ("session_lost", "silent", "session_failed")


class SessionReducer:
    """Applies the messages of one session. `sequences` and `reservations` are the session's tables, by handle. Rows
    whose handles are not in these tables any more are skipped. A row has a sequence's tokens of one engine step. A
    sequence's KV route has its pages transferred between engines.

    `lost` is called for every sequence that the scheduler has dropped before its end. `row` gets the measured speeds of
    prefill and of KV pulls.
    """

    def __init__(
        self,
        source: TransferSource,
        sequences: dict[int, SequenceState],
        reservations: dict[int, Reservation],
        detokenizer: DetokenizeStream,
        lost: Callable[[SequenceState, EngineFailure], None],
        row: ReplicaRow,
    ) -> None:
        self._source = source
        self._sequences = sequences
        self._reservations = reservations
        self._detokenizer = detokenizer
        self._lost = lost
        self._row = row
        self._count_gap: Callable[[float], None] = lambda seconds: None

    def serve(self, model: str) -> None:
        """From now on, record the times between tokens in the metrics of this model, which the scheduler runs."""
        self._count_gap = metrics.of_model(model).itl.observe

    def apply(self, step: SessionStep, now_ns: int) -> None:
        """Apply one message to the sequences and reservations, and pass its rows on to the tokenizer. Record the
        measured speeds of prefill and of KV pulls. Admissions and data about ends come first, then rows, failures,
        pulls and ended prefills. `now_ns` is the monotonic time of its arrival."""
        apply_events(step, self._sequences, self._reservations, self._source)
        rows = step.rows
        if rows is not None:
            apply_rows(rows, self._sequences, now_ns, self._count_gap)
            self._detokenizer.rows(rows.handle, rows.count, rows.token, rows.finish)
        if step.failed:
            self._apply_failures(step.failed)
        for pulled in step.pulled:
            self._apply_pull(pulled)
        for tokens, us in step.prefills:
            self._row.measure_prefill(tokens, us)
        for prefilled in step.prefilled:
            self._apply_prefill(prefilled)

    def lose_all(self, reason: str, *, unreachable: bool) -> None:
        """Report all sequences and reservations as lost, because the session has ended, and empty both tables. Release
        the sequences' loads, and close them on the Detokenize stream. If a request may have caused an end with this
        `reason` (`session_lost`, `silent` or `session_failed`), the sequences that the engine had admitted become
        suspects; the others and the reservations are bystanders. `unreachable`: the connection was lost, so the engine
        may still run."""
        deadly, error, instance = reason in _SUSPECT, session_lost(), self._source.instance
        lost = list(self._sequences.values())
        outage = Outage(reason, [sequence.engine for sequence in lost if sequence.admitted])
        ran = EngineFailure(reason, instance, error, suspect=deadly, unreachable=unreachable, outage=outage)
        waited = EngineFailure(reason, instance, error, bystander=deadly)
        self._sequences.clear()
        for sequence in lost:
            sequence.placement.release_load()
            self._detokenizer.close(sequence.handle)
            self._lost(sequence, ran if sequence.admitted else waited)
        kept = list(self._reservations.values())
        self._reservations.clear()
        for reservation in kept:
            reservation.lost(waited)

    def _apply_failures(self, failed: Sequence[Failed]) -> None:
        """Drop the sequences and reservations that the scheduler has failed, and close the sequences on the Detokenize
        stream. If the request itself is at fault, the sequence fails; otherwise it is reported as lost, so that another
        engine takes it. Admitted sequences that failed with the same code in one message share one cause, such as a
        lost worker."""
        ran: dict[str, list[SequenceState]] = {}
        for handle, error in failed:
            if (sequence := self._sequences.get(handle)) is not None and sequence.admitted:
                ran.setdefault(error.code, []).append(sequence)
        outages = {code: Outage(code, [one.engine for one in sequences]) for code, sequences in ran.items()}
        for handle, error in failed:
            sequence = self._sequences.pop(handle, None)
            if sequence is not None:
                self._detokenizer.close(handle)
                self._fail(sequence, error, outages.get(error.code))
            elif (reservation := self._reservations.pop(handle, None)) is not None:
                self._fail_reservation(reservation, error)

    def _fail(self, sequence: SequenceState, error: QuireError, outage: Outage | None) -> None:
        """Release the sequence's load. If the request itself is at fault, fail the sequence with this error; otherwise
        report the sequence as lost. `outage` covers all sequences that failed for the same cause; None: this one failed
        alone."""
        sequence.placement.release_load()
        failure = failure_of(self._source.instance, error, admitted=sequence.admitted, outage=outage)
        if failure is None:
            sequence.fail(error)
        else:
            self._lost(sequence, failure)

    def _fail_reservation(self, reservation: Reservation, error: QuireError) -> None:
        """If the request itself is at fault, fail the reservation's sequence; otherwise report the reservation as
        lost."""
        failure = failure_of(self._source.instance, error, admitted=reservation.admitted)
        if failure is None:
            reservation.fail(error)
        else:
            reservation.lost(failure)

    def _apply_pull(self, pulled: Pulled) -> None:
        """Record the speed of a pull, and tell the reservation or sequence, if it is still known, how many pages
        came."""
        self._row.measure_pull(pulled.found.pages, pulled.found.us, near=pulled.near)
        owner = self._reservations.get(pulled.handle) or self._sequences.get(pulled.handle)
        if owner is not None:
            owner.pages_pulled(pulled.found)

    def _apply_prefill(self, prefilled: Prefilled) -> None:
        """Drop a sequence whose prefill is done, close its text stream, release its load, and notify its KV route. If
        the sequence was to be decoded at this engine too, report the sequence as lost instead of notifying. Ignore a
        sequence that is unknown or has all its tokens."""
        sequence = self._sequences.get(prefilled.handle)
        if sequence is None or sequence.engine.finish:  # the Detokenize stream of this session ends the sequence
            return
        asked, route = sequence.kv_transfer(), sequence.kv.route
        del self._sequences[prefilled.handle]
        self._detokenizer.close(prefilled.handle)
        sequence.placement.release_load()
        if route is None or asked is None or not asked.prefill_only:
            self._lost(sequence, not_a_prefill(self._source.instance))
        else:
            route.prefill_ended(prefilled.timings)


def apply_events(
    step: SessionStep,
    sequences: Mapping[int, SequenceState],
    reservations: Mapping[int, Reservation],
    source: TransferSource,
) -> None:
    """Apply admissions (of sequences and reservations), prompt logprobs and the data about ends. Call before
    `apply_rows`: the last row ends a sequence, and all data about its end must be there before."""
    for admitted in step.admitted:
        sequence = sequences.get(admitted.handle)
        if sequence is not None:
            _admit(sequence, admitted, source)
        elif (reservation := reservations.get(admitted.handle)) is not None:
            reservation.admit(admitted.attempt, admitted.cached_tokens)
    for chunk in step.prompt_logprobs:
        sequence = sequences.get(chunk.owner)
        if sequence is not None:
            sequence.engine.add_prompt_logprobs(chunk, sequence.spec.prompt_ids)
    for finished in step.finished:
        sequence = sequences.get(finished.handle)
        if sequence is not None:
            _complete(sequence, finished)


def apply_rows(
    rows: StepRows, sequences: Mapping[int, SequenceState], now_ns: int, count_gap: Callable[[float], None]
) -> None:
    """Add each row's tokens and finish to its sequence, then add each logprob entry. At a sequence's first row at this
    engine, release its reserved load; if it has a KV route, tell the route of each row. `count_gap` gets the mean
    seconds between two tokens, once per row, but not for the first token. Rows whose handles are not in `sequences` are
    skipped."""
    token, at, find = rows.token, 0, sequences.get
    finishes = rows.finish or bytes(len(rows.handles))
    for handle, count, finish in zip(rows.handles, rows.counts, finishes, strict=True):
        end = at + 4 * count
        sequence = find(handle)
        if sequence is not None:
            engine = sequence.engine
            if engine.last_token_ns and count:
                count_gap(((now_ns - engine.last_token_ns) / count) * 1e-9)
            engine.add_row(token[at:end], finish, now_ns)
            if sequence.follows_rows:
                sequence.row_came(finish, now_ns)
        at = end
    for handle, entry in rows.entries:
        sequence = find(handle)
        if sequence is not None:
            sequence.engine.entries.append(entry)


def _admit(sequence: SequenceState, admitted: Admitted, source: TransferSource) -> None:
    """Record in the sequence that the engine has begun to run it, with so many cached tokens. Give the ticket, if there
    is one, to the sequence's KV route. The admission of another attempt is ignored."""
    if admitted.attempt != sequence.attempt:
        return
    sequence.engine.admit(admitted.attempt, admitted.cached_tokens)
    if sequence.kv.route is not None and admitted.ticket is not None:
        sequence.kv.route.ticket_came(admitted.ticket, source)


def _complete(sequence: SequenceState, finished: Finished) -> None:
    stop_token_id = finished.stop_token_id if finished.stop_token_id in sequence.job.stop_token_ids else None
    sequence.engine.complete(finished.cached_tokens, finished.timings, stop_token_id)
