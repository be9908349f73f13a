"""The send queue of one Detokenize stream: the opens, token rows and closes that wait to be sent to the tokenizer. An
open begins a sequence at the tokenizer.

Messages are small, so that no sequence delays the others. The open of a long history is split into parts, with rows of
other sequences in between. Long rows are cut. If the tokenizer is slow, waiting rows are joined, so the queue is never
larger than the answers themselves. Rows of a sequence that is still being opened are dropped, because its open reads
all tokens from the sequence.

A suspect is a sequence that a tokenizer worked on when this tokenizer was lost (see poison.py). The queue opens a
suspect in messages of its own, while no other message is in flight. If another tokenizer is lost meanwhile, the suspect
is to blame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32
from quire_common.errors import internal_error
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger
from quire_router.text.rows_codec import MESSAGE_BYTES, MoreRows, cut_rows, join_rows, rows_of, without

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quire_common.errors import QuireError
    from quire_router.sequences.sequence_state import SequenceState

# More steps than this are joined.
MAX_STEPS = 256
# A history of more bytes is long: its open is sent in parts.
_SHORT_BYTES = MESSAGE_BYTES // 8
# The least share of a message that a long history gets.
_LONG_BYTES = MESSAGE_BYTES // 2
# The least room for one part of an open or one row, in bytes.
_LEAST_BYTES = 4096
# Opens of so many bytes may be in flight, so that the next rows never wait behind more.
_MOST_OPENING_BYTES = 2 * MESSAGE_BYTES
log = get_logger(__name__)


@dataclass(slots=True)
class _Opening:
    """The part of a sequence that the tokenizer has been sent, in bytes; a token has four bytes. `sent_bytes` were sent
    in all. The open carries the first `prior_bytes`, which are the confirmed tokens; `prior_bytes` is -1 until the open
    begins. Rows carry the other tokens, and `sent_rows` rows were sent."""

    handle: int
    sequence: SequenceState
    prior_bytes: int = -1
    sent_bytes: int = 0
    sent_rows: int = 0
    done: bool = False


class DetokenizeOutgoing:
    """Makes the stream's messages. `sequences` is the session's table. `fail` is called with a sequence for which the
    queue cannot make a message."""

    def __init__(self, sequences: dict[int, SequenceState], fail: Callable[[SequenceState, QuireError], None]) -> None:
        self._sequences = sequences
        self._fail = fail
        self._wake = asyncio.Event()
        self._over = False
        # Sequences that are not wholly open yet: all of them by handle, then each kind in sending order.
        self._opening: dict[int, _Opening] = {}
        self._short: deque[_Opening] = deque()
        self._long: deque[_Opening] = deque()
        self._suspects: deque[_Opening] = deque()
        # The suspect that is being opened, and whether a message of it is in flight.
        self._opening_suspect: _Opening | None = None
        self._suspect_in_flight = False
        self._others_next = False
        self._rows: deque[tb.DetokenizeRequest] = deque()
        self._join_at = MAX_STEPS
        self._closes: list[int] = []
        # Sent messages, each with the bytes of its opens; the tokenizer answers them in this order.
        self._unanswered: deque[tuple[tb.DetokenizeRequest, int]] = deque()
        self._opening_bytes = 0

    @property
    def backlog(self) -> int:
        """The number of messages with rows that wait to be sent: one for each step, unless steps were cut or joined."""
        return len(self._rows)

    @property
    def owed(self) -> bool:
        """Whether an answer of the tokenizer is due, or rows or opens wait to be sent. Closes that wait do not
        count."""
        return bool(self._unanswered or self._rows or self._opening)

    def open(self, sequence: SequenceState) -> None:
        """Queue a sequence to be opened; `rows` may be called for the sequence from now on. The open carries the tokens
        whose text has come, and the other tokens follow as rows. A sequence that is suspected of having killed a
        tokenizer waits in a queue of its own, and a long history in another."""
        opening = self._opening[sequence.handle] = _Opening(sequence.handle, sequence)
        if sequence.text.strikes:
            self._suspects.append(opening)
        else:
            (self._long if len(sequence.engine.output_ids) > _SHORT_BYTES else self._short).append(opening)
        self._wake.set()

    def rows(self, step: tb.DetokenizeRequest) -> None:
        """Queue one step of the engine, without the rows of sequences that are not wholly open yet. A step of more than
        32 KiB is cut into several. If more than 256 steps wait, and more than twice as many as the last joining left,
        they are joined to one row per sequence, without sequences that have left. The sequences are told if the number
        of their rows changes."""
        if self._opening:
            step = without(step, self._opening)
            if not step.handle:
                return
        if len(step.token) > MESSAGE_BYTES:
            messages, more = cut_rows(rows_of(step))
            self._rows.extend(messages)
            self._count_rows(more)
        else:
            self._rows.append(step)
        if len(self._rows) > self._join_at:
            messages, more = join_rows(self._rows, self._sequences)
            self._rows = deque(messages)
            self._count_rows(more)
            self._join_at = max(MAX_STEPS, 2 * len(self._rows))
        self._wake.set()

    def close(self, handle: int) -> None:
        """Queue the message that nobody wants the text of the handle any more. An open of the handle that still waits
        is dropped."""
        self._opening.pop(handle, None)
        self._closes.append(handle)
        self._wake.set()

    def end(self) -> None:
        """End `messages`: the stream is over."""
        self._over = True
        self._wake.set()

    def note_answer(self) -> SequenceState | None:
        """Remove the oldest unanswered message, because the tokenizer has answered it, and wake `messages` if anything
        waits to be sent. If this answer completes the open of a suspect, returns the suspect, unless it has left the
        session; otherwise returns None. Raises IndexError if no message is unanswered."""
        self._opening_bytes -= self._unanswered.popleft()[1]
        if self._rows or self._closes or self._opening or self._suspects or self._opening_suspect is not None:
            # There may be room for more opens, or for what waited for the last answer.
            self._wake.set()
        opening = self._opening_suspect
        if opening is None or not self._suspect_in_flight:
            return None
        self._suspect_in_flight = False
        if not opening.done:
            return None
        self._opening_suspect = None
        return opening.sequence if self._sequences.get(opening.handle) is opening.sequence else None

    def unanswered(self, *, oldest: bool) -> set[int]:
        """Return the handles in all messages that were sent and not answered; with `oldest`, only the handles in the
        oldest such message."""
        found: set[int] = set()
        for message, _ in list(self._unanswered)[: 1 if oldest else None]:
            found.update(i32(message.handle, "handle").tolist())
            found.update(opened.handle for opened in message.open)
        return found

    async def messages(self) -> AsyncIterator[tb.DetokenizeRequest]:
        """Yield the stream's requests until `end` is called, and wait while there is nothing to send. Each request
        counts as unanswered until `note_answer`. The first request is empty, so that its answer shows that the
        tokenizer works."""
        first = tb.DetokenizeRequest()
        self._unanswered.append((first, 0))
        yield first
        while True:
            await self._wake.wait()
            if self._over:
                return
            self._wake.clear()
            while (message := self._next()) is not None:
                opening_bytes = sum(opened.ByteSize() for opened in message.open) if message.open else 0
                self._opening_bytes += opening_bytes
                self._unanswered.append((message, opening_bytes))
                yield message
                if self._over:
                    return

    def _count_rows(self, more: MoreRows) -> None:
        """Tell each sequence of the session how many more or fewer answers to rows it must expect now."""
        for handle, count in more.items():
            sequence = self._sequences.get(handle)
            if sequence is not None:
                sequence.text.add_rows(count)

    def _next(self) -> tb.DetokenizeRequest | None:
        """Make the next message: the oldest step's rows, then short opens, a part of one long open, and, if no rows are
        left, all closes. Returns None if nothing is queued, or if answers must come first.

        A message of a suspect waits until all earlier messages are answered. Meanwhile, and until it is answered
        itself, other messages wait. After it, one message of other sequences goes before the next message of a suspect.
        Opens wait while too many bytes of opens are in flight.
        """
        if self._suspect_in_flight:
            return None
        opens = bool(self._short or self._long) and self._opening_bytes < _MOST_OPENING_BYTES
        others = bool(opens or self._rows or self._closes)
        suspect_waits = self._opening_suspect is not None or self._suspects
        if suspect_waits and not (self._others_next and others):
            return None if self._unanswered else self._open_suspect()
        if not others:
            return None
        self._others_next = False
        message = self._rows.popleft() if self._rows else tb.DetokenizeRequest()
        size, most = len(message.token), MESSAGE_BYTES - (_LONG_BYTES if self._long else 0)
        while opens and self._short and size < most:
            size += self._add_opening(self._short[0], message, MESSAGE_BYTES - size)
            if self._short[0].done:
                self._short.popleft()
        if opens and self._long:
            self._add_opening(self._long[0], message, max(MESSAGE_BYTES - size, _LONG_BYTES))
            if self._long[0].done:
                self._long.popleft()
        if self._closes and not self._rows:  # a close must not overtake its handle's rows
            message.close = pack_i32(self._closes)
            self._closes = []
        return message

    def _open_suspect(self) -> tb.DetokenizeRequest:
        """Make a message that carries one suspect, or the part of the suspect that fits into the message. The message
        is empty if the suspect has left the session. Marks the suspect's message as in flight."""
        opening = self._opening_suspect = self._opening_suspect or self._suspects.popleft()
        self._suspect_in_flight = self._others_next = True
        message = tb.DetokenizeRequest()
        self._add_opening(opening, message, MESSAGE_BYTES)
        return message

    def _add_opening(self, opening: _Opening, message: tb.DetokenizeRequest, room: int) -> int:
        """Add the next part of a sequence's open to the message, up to `room` bytes of tokens. The open carries the
        tokens whose text has come. When the open is complete, add a row with as many of the sequence's other tokens as
        fit. Both the open and the row may take 4096 bytes even if there is less room. Returns the number of bytes that
        were added, with the open's settings.

        Sets `opening.done` when everything was added, or when the sequence has left the session. If the open or the row
        cannot be made, this is logged, and the sequence leaves the session and fails.
        """
        handle, sequence = opening.handle, opening.sequence
        # A sequence that has left may have another handle by now.
        if self._opening.get(handle) is not opening or self._sequences.get(handle) is not sequence:
            opening.done = True
            if self._opening.get(handle) is opening:  # its text ended before all of its tokens were sent
                del self._opening[handle]
            return 0
        try:
            size = 0
            if opening.sent_bytes < opening.prior_bytes or opening.prior_bytes < 0:
                size = _add_open(opening, message, max(room, _LEAST_BYTES))
            if opening.sent_bytes == opening.prior_bytes or opening.sent_rows:
                size += _add_rows(opening, message, max(room - size, _LEAST_BYTES))
        except Exception:
            # One bad request must not end the stream of all.
            log.exception("a sequence could not be opened", request_id=sequence.context.request_id)
            opening.done, size = True, 0
            del self._sequences[handle]
            self._fail(sequence, internal_error())
        if opening.done:
            del self._opening[handle]
        return size


def _add_open(opening: _Opening, message: tb.DetokenizeRequest, room: int) -> int:
    """Add the open, or a further part of the open, with as many confirmed tokens (those whose text has come) as fit
    into `room` bytes. The first part has the sequence's settings, and makes the sequence forget text parts whose text
    has not come. Returns the size of what was added, in bytes."""
    sequence = opening.sequence
    if opening.prior_bytes < 0:
        opening.prior_bytes = 4 * sequence.text.confirmed
        sequence.text.forget_early_parts()
        part = _open_to_pb(sequence)
    else:
        part = tb.DetokenizeOpen(handle=opening.handle, further=True)
    end = min(opening.sent_bytes + room // 4 * 4, opening.prior_bytes)
    part.prior_ids = bytes(sequence.engine.output_ids[opening.sent_bytes : end])
    part.more_prior = end < opening.prior_bytes
    opening.sent_bytes = end
    message.open.append(part)
    return int(part.ByteSize())


def _add_rows(opening: _Opening, message: tb.DetokenizeRequest, room: int) -> int:
    """Add at most one row, with as many of the sequence's next tokens as fit into `room` bytes; the last row carries
    the finish. No row is added if there is neither a token nor a finish. Tell the sequence how many answers it must
    expect. Returns the size of the tokens in bytes. Sets `done` when the last token was added."""
    sequence = opening.sequence
    ids = bytes(sequence.engine.output_ids[opening.sent_bytes : opening.sent_bytes + room // 4 * 4])
    opening.sent_bytes += len(ids)
    opening.done = opening.sent_bytes >= len(sequence.engine.output_ids)
    finish = sequence.engine.finish if opening.done else 0
    if ids or finish:
        rows = len(message.handle) // 4
        message.finish = (message.finish or bytes(rows)) + bytes([finish])
        message.handle += pack_i32([opening.handle])
        message.count += pack_i32([len(ids) // 4])
        message.token += ids
        opening.sent_rows += 1
    # While more rows are to follow, the answers to the rows that were sent are not the last answers.
    rows = opening.sent_rows + (not opening.done)
    sequence.text.reopen(rows, sequence.engine.rows, begins=opening.sent_rows <= 1)
    return len(ids)


def _open_to_pb(sequence: SequenceState) -> tb.DetokenizeOpen:
    """Make the open of a sequence without its tokens. It has the stop strings and stop tokens, the text settings, the
    number of characters already sent, and how to parse reasoning and tool calls."""
    text, stop = sequence.job.text, sequence.spec.stop
    parsing = None
    if text.parsing is not None:
        parsing = tb.OutputParsing(
            tool_calls=text.parsing.tool_calls,
            reasoning=text.parsing.reasoning,
            tools_json=text.parsing.tools_json,
            prompt_end=text.parsing.prompt_end,  # type: ignore[arg-type]  # the number that a tokenizer has sent
        )
    return tb.DetokenizeOpen(
        handle=sequence.handle,
        stop=text.stop,
        include_stop_str_in_output=text.include_stop_str_in_output,
        skip_special_tokens=text.skip_special_tokens,
        spaces_between_special_tokens=text.spaces_between_special_tokens,
        chars_sent=sequence.text.chars_sent,
        min_tokens=stop.min_tokens,
        want_offsets=bool(sequence.handle & 1),
        stop_token_ids=pack_i32(sequence.stop_token_ids),
        context=context_to_pb(sequence.context),
        parsing=parsing,
    )
