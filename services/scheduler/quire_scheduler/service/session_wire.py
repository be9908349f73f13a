"""Converts a step's outputs for one session to messages, with columns as bytes and notes as messages, and the router's
transfers and handovers from messages. Only this module knows both forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2, scheduler_pb2
from quire_common.columns import i32
from quire_common.credit.logprobs import logprobs_to_pb
from quire_common.credit.prompt_logprobs import prompt_logprobs_to_pb
from quire_common.errors import InvalidArgument, to_message
from quire_common.ticket import KvTransfer, Ticket, ticket_from_pb, ticket_to_pb
from quire_scheduler.disaggregation.handover import Handover

if TYPE_CHECKING:
    from quire_scheduler.core.outputs import FinishedNote, SessionOutputs
    from quire_scheduler.core.timing import Hop


def outputs_to_pb(out: SessionOutputs) -> scheduler_pb2.SessionResponse:
    """Encode a session's outputs as one message: rows as columns of bytes, logprobs, prompt logprobs, and one entry for
    each note (admitted with its ticket, finished, failed, prefilled, pulled)."""
    message = scheduler_pb2.SessionResponse()
    put_columns(out, message)
    if out.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(out.prompt_logprobs))
    for admitted in out.admitted:
        note = message.admitted.add(
            handle=admitted.handle, attempt=admitted.attempt, cached_tokens=admitted.cached_tokens
        )
        if admitted.ticket is not None:
            note.ticket.CopyFrom(ticket_to_pb(admitted.ticket))
    for finished in out.finished:
        message.finished.append(finished_to_pb(finished))
    for failed in out.failed:
        message.failed.add(handle=failed.handle, error=to_message(failed.error))
    for prefilled in out.prefilled:
        message.prefilled.add(handle=prefilled.handle, timings=_timings(prefilled.hops))
    for pulled in out.pulled:
        told = message.pulled.add(
            handle=pulled.handle,
            pages=pulled.pages,
            wanted_pages=pulled.wanted,
            us=max(pulled.us, 0),
            near=pulled.near,
        )
        if pulled.error is not None:
            told.error.CopyFrom(to_message(pulled.error))
    return message


def put_columns(out: SessionOutputs, into: scheduler_pb2.SessionResponse) -> None:
    """Write the outputs' rows and logprobs into the message, in place of those that it has. If the outputs have no
    logprobs, those of the message stay."""
    into.handle, into.count = out.handle.tobytes(), out.count.tobytes()
    into.token, into.finish = out.token.tobytes(), out.finish.tobytes()
    if out.logprobs is not None:
        into.logprobs.CopyFrom(logprobs_to_pb(out.logprobs))


def transfer_from_pb(message: scheduler_pb2.KvTransfer) -> KvTransfer:
    """Decode a transfer. If its ticket contradicts itself, the transfer has the error in place of the ticket, and the
    request does not fail."""
    ticket, refusal = _ticket_of(message)
    return KvTransfer(message.prefill_only, ticket, message.await_handover, message.lease_ms, refusal)


def handover_from_pb(message: scheduler_pb2.Handover) -> Handover:
    """Decode a handover. If its ticket contradicts itself, the handover has the error in place of the ticket. Raises
    InvalidArgument if its tokens are not a column of int32."""
    ticket, refusal = _ticket_of(message)
    return Handover(ticket, tuple(i32(message.token, "token").tolist()), message.give_up, refusal)


def outputs_to_generated(out: SessionOutputs) -> scheduler_pb2.GenerateTokensResponse:
    """Encode the outputs of one request as a message of the GenerateTokens stream: tokens, the finish reason of the
    last row, logprobs, prompt logprobs, and the finished note if there is one. Other notes are left out."""
    message = scheduler_pb2.GenerateTokensResponse(token=out.token.tobytes())
    if len(out.finish) and out.finish[-1]:
        message.finish_reason = common_pb2.FinishReason.Name(int(out.finish[-1]))  # type: ignore[assignment]  # names are accepted
    if out.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_pb(out.logprobs))
    if out.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(out.prompt_logprobs))
    if out.finished:
        message.finished.CopyFrom(finished_to_pb(out.finished[0]))
    return message


def finished_to_pb(note: FinishedNote) -> scheduler_pb2.Finished:
    """Encode a finished note: usage, timings, and the stop token if there is one."""
    message = scheduler_pb2.Finished(
        handle=note.handle,
        usage=common_pb2.Usage(
            prompt_tokens=note.prompt_tokens,
            completion_tokens=note.completion_tokens,
            cached_tokens=note.cached_tokens,
        ),
        timings=_timings(note.hops),
    )
    if note.stop_token_id >= 0:
        message.stop_token_id = note.stop_token_id
    return message


def _ticket_of(
    message: scheduler_pb2.KvTransfer | scheduler_pb2.Handover,
) -> tuple[Ticket | None, InvalidArgument | None]:
    """Decode the message's ticket. Returns the ticket, or the error if the ticket contradicts itself; two times None if
    the message has no ticket."""
    if not message.HasField("ticket"):
        return None, None
    try:
        return ticket_from_pb(message.ticket), None
    except InvalidArgument as error:
        return None, error


def _timings(hops: list[Hop]) -> list[common_pb2.HopTiming]:
    return [common_pb2.HopTiming(service=h.service, phase=h.phase, us=h.us, count=h.operations) for h in hops]
