"""Applies what a scheduler says to the sequences and reservations that its session has: the one writer of what engines
send. Knows neither protobuf nor the stream.
"""

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
    """`sequences` and `reservations` are the session's tables, by handle; rows of handles that have gone are skipped.

    `lost` is called for every sequence that the scheduler works on no more without having ended it. `row` gets the
    measured speed of prefill and of pulls.
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
        """Count times between tokens from now on as those of this model, which the scheduler runs."""
        self._count_gap = metrics.of_model(model).itl.observe

    def apply(self, step: SessionStep, now_ns: int) -> None:
        """Apply one message, which came at `now_ns`, to the sequences and reservations; pass its rows on to the
        tokenizer."""
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
        """Report all sequences and reservations as lost, since the session is over, and empty both tables. Where a
        request may have caused that `reason`, those that ran are suspected."""
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
        """Drop the sequences and reservations that failed, and fail each or report it as lost. Those that failed by one
        code in one message share a cause, such as a worker that was lost."""
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
        """Release the sequence's load; fail the sequence if the fault is its own, else report it as lost."""
        sequence.placement.release_load()
        failure = failure_of(self._source.instance, error, admitted=sequence.admitted, outage=outage)
        if failure is None:
            sequence.fail(error)
        else:
            self._lost(sequence, failure)

    def _fail_reservation(self, reservation: Reservation, error: QuireError) -> None:
        """Fail the reservation's sequence if the fault is its own, else report the reservation as lost."""
        failure = failure_of(self._source.instance, error, admitted=reservation.admitted)
        if failure is None:
            reservation.fail(error)
        else:
            reservation.lost(failure)

    def _apply_pull(self, pulled: Pulled) -> None:
        """Record the speed of a pull, and tell the sequence or reservation that its pages were pulled."""
        self._row.measure_pull(pulled.found.pages, pulled.found.us, near=pulled.near)
        owner = self._reservations.get(pulled.handle) or self._sequences.get(pulled.handle)
        if owner is not None:
            owner.pages_pulled(pulled.found)

    def _apply_prefill(self, prefilled: Prefilled) -> None:
        """Drop a sequence whose prefill is done and tell its KV route. A sequence that was not submitted for its
        prefill alone is reported as lost."""
        sequence = self._sequences.get(prefilled.handle)
        if sequence is None or sequence.engine.finish:  # the last token's text comes by this session's stream
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
    """Apply admissions, prompt logprobs and ends. They come before the rows, so that a last row finds all that belongs
    to the end."""
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
    """Add each row's tokens to its sequence, then each logprob entry. `count_gap` gets the seconds between two tokens,
    once a row. Handles that have gone are skipped."""
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
    """Note that an engine has begun the sequence, and give its ticket to the KV route; another attempt's admission is
    ignored."""
    if admitted.attempt != sequence.attempt:
        return
    sequence.engine.admit(admitted.attempt, admitted.cached_tokens)
    if sequence.kv.route is not None and admitted.ticket is not None:
        sequence.kv.route.ticket_came(admitted.ticket, source)


def _complete(sequence: SequenceState, finished: Finished) -> None:
    stop_token_id = finished.stop_token_id if finished.stop_token_id in sequence.job.stop_token_ids else None
    sequence.engine.complete(finished.cached_tokens, finished.timings, stop_token_id)
