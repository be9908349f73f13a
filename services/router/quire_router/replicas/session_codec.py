"""Converts a SessionResponse to plain values. Token ids stay int32 bytes. This module knows no sequences."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from quire_common.columns import equal_lengths, i32
from quire_common.credit.logprobs import check_sum, logprobs_from_pb
from quire_common.credit.prompt_logprobs import prompt_logprobs_from_pb
from quire_common.errors import InvalidArgument, from_message
from quire_common.telemetry.logs import get_logger
from quire_common.ticket import ticket_from_pb
from quire_router.replicas.session_step import Admitted, Failed, Finished, Prefilled, Pulled, SessionStep, StepRows
from quire_router.sequences.delta import HopTiming
from quire_router.sequences.kv_route import PulledPages
from quire_router.sequences.logprob_entries import pack_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from quire.v1 import common_pb2 as pb
    from quire.v1 import scheduler_pb2 as sb
    from quire_common.ticket import Ticket

log = get_logger(__name__)


def session_step(message: sb.SessionResponse, instance: str = "") -> SessionStep:
    """Convert a message of the scheduler `instance` to plain values: admissions, prompt logprobs, ends, rows of new
    tokens, failures, pulls and prefills. A ticket that cannot be read is logged and becomes None. Raises
    InvalidArgument for a column that cannot be read, and for columns of rows or logprobs that contradict each
    other."""
    finished, prefilled = message.finished, message.prefilled
    # Most messages have rows and nothing else, so other fields are read only where they have entries.
    return SessionStep(
        [_admitted(one) for one in message.admitted] if message.admitted else (),
        prompt_logprobs_from_pb(message.prompt_logprobs) if message.HasField("prompt_logprobs") else (),
        [_finished(one, instance) for one in finished] if finished else (),
        _rows(message) if message.handle else None,
        [Failed(one.handle, from_message(one.error)) for one in message.failed] if message.failed else (),
        [_pulled(one, instance) for one in message.pulled] if message.pulled else (),
        list(_prefills(finished, prefilled)) if finished or prefilled else (),
        [Prefilled(one.handle, _hop_timings(one.timings, instance)) for one in prefilled] if prefilled else (),
    )


def _admitted(message: sb.Admitted) -> Admitted:
    ticket = _ticket(message.ticket) if message.HasField("ticket") else None
    return Admitted(message.handle, message.attempt, message.cached_tokens, ticket)


def _ticket(message: sb.Ticket) -> Ticket | None:
    """Convert a ticket. Log a ticket that cannot be read, and return None; its pages are computed again."""
    try:
        return ticket_from_pb(message)
    except InvalidArgument as error:
        log.warning("bad ticket", instance=message.instance, reason=error.message)
        return None


def _finished(message: sb.Finished, instance: str) -> Finished:
    """Convert the report of a request's end: handle, cached tokens, timings with the scheduler's `instance`, and the
    stop token (None if no stop token ended the request)."""
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    timings = _hop_timings(message.timings, instance)
    return Finished(message.handle, message.usage.cached_tokens, timings, stop_token_id)


def _hop_timings(timings: Iterable[pb.HopTiming], instance: str) -> tuple[HopTiming, ...]:
    return tuple(HopTiming(t.service, t.phase, t.us, t.count, instance) for t in timings)


def _prefills(finished: Iterable[sb.Finished], prefilled: Iterable[sb.Prefilled]) -> Iterator[tuple[int, int]]:
    """Yield (prompt tokens, microseconds) for each prefill that the timings of these ended requests report: the tokens
    that the worker computed, and the time that this took."""
    for timings in (*(one.timings for one in finished), *(one.timings for one in prefilled)):
        for timing in timings:
            if (timing.service, timing.phase) == ("worker", "prefill"):
                yield timing.count, timing.us


def _pulled(message: sb.Pulled, instance: str) -> Pulled:
    """Convert the report of a pull of KV pages: handle, pages that came and that were wanted, microseconds, error (None
    if the pull succeeded), and whether the source was on the same host."""
    error = from_message(message.error) if message.HasField("error") else None
    found = PulledPages(message.pages, message.wanted_pages, message.us, error, instance)
    return Pulled(message.handle, found, message.near)


def _rows(message: sb.SessionResponse) -> StepRows:
    """Convert the message's columns of new tokens to StepRows: handles and counts also as lists, and logprobs, if there
    are any, as packed entries. Raises InvalidArgument for columns of handles and counts that cannot be read or differ
    in length; the token ids are checked only if there are logprobs (see `_entries`)."""
    handle, count = i32(message.handle, "handle"), i32(message.count, "count")
    equal_lengths("rows", handle=handle, count=count)
    handles, counts = handle.tolist(), count.tolist()
    entries = _entries(message.logprobs, message.token, handles, count) if message.HasField("logprobs") else []
    return StepRows(message.handle, message.count, message.token, message.finish, handles, counts, entries)


def _entries(
    columns: pb.LogprobColumns, token: bytes, handles: Sequence[int], count: NDArray[np.int32]
) -> list[tuple[int, bytes]]:
    """Pack the logprobs of each token that has some into an entry: token id, logprob, rank and top tokens. Returns
    (handle of the sequence, entry) for each such token, in the order of the tokens. Raises InvalidArgument for columns
    that cannot be read or contradict each other, and for entries of unknown tokens or in another order."""
    ids, logprobs = i32(token, "token").tolist(), logprobs_from_pb(columns)
    check_sum("count", count, len(ids))
    indices, ends = logprobs.token_index.tolist(), list(accumulate(count.tolist()))
    if indices and not (indices[0] >= 0 and indices[-1] < len(ids) and indices == sorted(indices)):
        raise InvalidArgument(
            "BAD_TOKEN_INDEX",
            f"Column token_index does not ascend within the {len(ids)} tokens.",
            "Send the logprobs in the order of their tokens.",
            param="token_index",
        )
    tops, top_logprobs = logprobs.top_id.tobytes(), logprobs.top_logprob.tobytes()
    found: list[tuple[int, bytes]] = []
    row, at = 0, 0
    entries = zip(indices, logprobs.logprob.tolist(), logprobs.rank.tolist(), logprobs.top_count.tolist(), strict=True)
    for index, logprob, rank, top_count in entries:
        while ends[row] <= index:
            row += 1
        top = slice(4 * at, 4 * (at + top_count))
        found.append((handles[row], pack_entry(ids[index], logprob, rank, tops[top], top_logprobs[top])))
        at += top_count
    return found
