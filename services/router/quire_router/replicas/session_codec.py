"""One SessionResponse, applied to the choices that it speaks of. Reads columns row by row, tokens stay bytes."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

from quire_common.columns import f32, i32
from quire_common.credit.prompt_logprobs import prompt_logprobs_from_pb
from quire_common.errors import InvalidArgument, from_message
from quire_common.telemetry.logs import get_logger
from quire_common.ticket import ticket_from_pb
from quire_router import metrics
from quire_router.sequences.delta import HopTiming, LogprobEntry
from quire_router.sequences.kv_route import PulledPages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from quire.v1 import common_pb2 as pb
    from quire.v1 import scheduler_pb2 as sb
    from quire_router.kv_transfer.reservation import Reservation
    from quire_router.sequences.kv_route import KvRoute
    from quire_router.sequences.sequence_state import SequenceState

log = get_logger(__name__)


def apply_events(
    message: sb.SessionResponse,
    sequences: Mapping[int, SequenceState],
    reservations: Mapping[int, Reservation],
    instance: str = "",
) -> None:
    """Admissions and ends; before the rows, so that the last row finds all that belongs to the end."""
    for admitted in message.admitted:
        sequence = sequences.get(admitted.handle)
        if sequence is None:
            _admit_reservation(admitted, reservations)
        elif admitted.attempt == sequence.attempt:
            sequence.admitted_attempt = admitted.attempt
            if not sequence.resumed:
                sequence.cached_tokens = admitted.cached_tokens
            if sequence.kv_route is not None and admitted.HasField("ticket"):
                _give_ticket(sequence.kv_route, admitted.ticket)
    if message.HasField("prompt_logprobs"):
        _apply_prompt_logprobs(message.prompt_logprobs, sequences)
    for finished in message.finished:
        sequence = sequences.get(finished.handle)
        if sequence is None:
            continue
        if not sequence.resumed:  # the emitted tokens of a resumed one may be in a cache too: they are no prompt
            # Fewer than at the admission where pages did not come after all.
            sequence.cached_tokens = finished.usage.cached_tokens
        sequence.timings = hop_timings(finished.timings, instance)
        if finished.HasField("stop_token_id") and finished.stop_token_id in sequence.job.stop_token_ids:
            sequence.stop_reason = finished.stop_token_id


def hop_timings(timings: Iterable[pb.HopTiming], instance: str) -> tuple[HopTiming, ...]:
    """Wire to domain, as an instance's account."""
    return tuple(HopTiming(t.service, t.phase, t.us, t.count, instance) for t in timings)


def prefills(message: sb.SessionResponse) -> Iterator[tuple[int, int]]:
    """Of each request that is over, the prompt tokens that were computed for it and how long that took in us."""
    for timings in (*(one.timings for one in message.finished), *(one.timings for one in message.prefilled)):
        for timing in timings:
            if (timing.service, timing.phase) == ("worker", "prefill"):
                yield timing.count, timing.us


def pulled_from_pb(pulled: sb.Pulled, instance: str) -> PulledPages:
    """Wire to domain, as an instance's account."""
    error = from_message(pulled.error) if pulled.HasField("error") else None
    return PulledPages(pulled.pages, pulled.wanted_pages, pulled.us, error, instance)


def _admit_reservation(admitted: sb.Admitted, reservations: Mapping[int, Reservation]) -> None:
    reservation = reservations.get(admitted.handle)
    if reservation is not None and admitted.attempt == reservation.attempt:
        reservation.admitted = True
        reservation.cached_tokens = admitted.cached_tokens


def _give_ticket(route: KvRoute, message: sb.Ticket) -> None:
    """One that cannot be read is none: its pages are computed again."""
    try:
        route.admitted(ticket_from_pb(message))
    except InvalidArgument as error:
        log.warning("bad ticket", instance=message.instance, reason=error.message)


def _apply_prompt_logprobs(columns: pb.PromptLogprobColumns, sequences: Mapping[int, SequenceState]) -> None:
    """Positions that come again, after a preemption or a move, say the same again."""
    for chunk in prompt_logprobs_from_pb(columns):
        sequence = sequences.get(chunk.owner)
        if sequence is None:
            continue
        logprobs, at = chunk.logprobs, 0
        tops, top_logprobs = array("i", logprobs.top_id.tobytes()), array("f", logprobs.top_logprob.tobytes())
        ids = sequence.spec.prompt_ids[chunk.first : chunk.first + len(logprobs.logprob)].tolist()
        each = zip(ids, logprobs.logprob.tolist(), logprobs.rank.tolist(), logprobs.top_count.tolist(), strict=True)
        for position, (token_id, logprob, rank, count) in enumerate(each, start=chunk.first):
            top = slice(at, at + count)
            sequence.prompt_entries[position] = LogprobEntry(token_id, logprob, rank, tops[top], top_logprobs[top])
            at += count


def apply_rows(message: sb.SessionResponse, sequences: Mapping[int, SequenceState], now_ns: int) -> int:
    """Give every choice its row; returns the number of tokens. Rows of handles that have gone are skipped."""
    handles, counts = i32(message.handle, "handle").tolist(), i32(message.count, "count").tolist()
    token, at, find, gap = message.token, 0, sequences.get, metrics.itl.observe
    for handle, count, finish in zip(handles, counts, message.finish or bytes(len(handles)), strict=True):
        end = at + 4 * count
        sequence = find(handle)
        if sequence is not None:
            if sequence.last_token_ns and count:
                gap(((now_ns - sequence.last_token_ns) / count) * 1e-9)
            sequence.received(token[at:end], finish, now_ns)
        at = end
    if message.HasField("logprobs"):
        _apply_logprobs(message.logprobs, token, handles, counts, sequences)
    return at // 4


def _apply_logprobs(
    columns: pb.LogprobColumns,
    token: bytes,
    handles: Sequence[int],
    counts: Sequence[int],
    sequences: Mapping[int, SequenceState],
) -> None:
    """Entries come in the order of the message's tokens, so one pass over the rows finds each its own."""
    ids, ends = i32(token, "token"), list(accumulate(counts))
    tops = array("i", i32(columns.top_id, "top_id").tobytes())
    top_logprobs = array("f", f32(columns.top_logprob, "top_logprob").tobytes())
    row, at = 0, 0
    entries = zip(
        i32(columns.token_index, "token_index").tolist(),
        f32(columns.logprob, "logprob").tolist(),
        i32(columns.rank, "rank").tolist(),
        i32(columns.top_count, "top_count").tolist(),
        strict=True,
    )
    for index, logprob, rank, top_count in entries:
        while ends[row] <= index:
            row += 1
        sequence = sequences.get(handles[row])
        if sequence is not None:
            top = slice(at, at + top_count)
            sequence.entries.append(LogprobEntry(int(ids[index]), logprob, rank, tops[top], top_logprobs[top]))
        at += top_count
