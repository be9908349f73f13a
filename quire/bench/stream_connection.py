"""StreamConnection: one HTTP/1.1 connection for streams, with its own parser of heads, chunks and server-sent events.

A load generator must cost less than the server that it measures. So the connection finds the events of a stream by
their bytes, and notes when each arrived. It parses only the event with the usage as JSON. A connection has one request
at a time, and stays open for the next one.
"""

from __future__ import annotations

import asyncio
import json
import re
from time import perf_counter

from quire.bench.outcome import Outcome

_MAX_ERROR_BYTES = 2000
# No text has it: quotes in a string are escaped. `prompt_token_ids` is another.
_TOKEN_IDS = re.compile(rb'"token_ids": ?\[([^\]]*)\]')


class _MalformedUsage(ValueError):
    """The server sent a usage that cannot be read."""


class StreamConnection(asyncio.Protocol):
    """`send` sends a request and returns its future. After an answer, `reusable` says whether another request may
    follow; a new connection takes its first request without it."""

    def __init__(self, *, keep_events: bool) -> None:
        self.reusable = False
        self._keep_events = keep_events
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._outcome = Outcome()
        self._rest = b""
        self._event = b""
        self._status = 0
        self._in_head = True
        # Bytes of the body that are yet to come; -1: it comes in chunks; -2: it ends with the connection.
        self._left = 0
        self._body = b""

    def send(self, request: bytes, outcome: Outcome) -> asyncio.Future[None]:
        """Send a request. The future is done when the answer is complete or has failed; by then, `outcome` is filled.
        Raises RuntimeError while another request is under way or before the connection is made. On a connection that
        has been lost, the future is never done."""
        if self._transport is None or (self._done is not None and not self._done.done()):
            raise RuntimeError("the connection is not free")
        self.reusable = False
        self._outcome, self._done = outcome, asyncio.get_running_loop().create_future()
        self._rest, self._event, self._body, self._in_head = b"", b"", b"", True
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is ready for a request."""
        self._transport = transport  # type: ignore[assignment]  # what create_connection makes is a Transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete an answer whose end is that of the connection; fail any other incomplete answer. An answer of status
        200 fails in both cases if the connection broke with an error. The future is done in all cases, and the
        connection is not reusable."""
        self._keep = self.reusable = False
        if self._done is not None and not self._done.done():
            if self._left == -2 and not self._in_head and (exc is None or self._status != 200):
                self._end()
                return
            if self._outcome.ok:
                self._outcome.fail(f"connection lost: {exc or 'closed by the server'}")
            self._done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse the data of an answer as they arrive: the head, then a body with or without chunks. All events that
        arrive together get the same time. Malformed HTTP, or a usage that is no JSON, fails the outcome and closes the
        connection. A usage without its two counts only ends the connection. In both cases `connection_lost` then
        completes the future, without an exception."""
        now_s = perf_counter()
        try:
            if self._in_head:
                data = self._head(data)
                if self._in_head:
                    return
            if self._left == -1:
                self._chunks(data, now_s)
            else:
                self._plain(data, now_s)
        except _MalformedUsage as error:
            self._outcome.fail(str(error))
            self.close()
        except (ValueError, IndexError) as error:
            self._outcome.fail(f"not HTTP: {error}")
            self.close()

    def _head(self, data: bytes) -> bytes:
        """Read the answer's head from `data` and what was left before. Stores the status, whether the connection stays
        open, and how the body ends: in chunks, by its length, or with the connection. Returns the bytes after the head;
        empty while the head is incomplete. Raises ValueError or IndexError for a malformed head."""
        data = self._rest + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._rest = data
            return b""
        lines = data[:end].split(b"\r\n")
        self._status = int(lines[0].split(b" ", 2)[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        self._keep = headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._left = -1
        else:
            self._left = _length(headers[b"content-length"]) if b"content-length" in headers else -2
        self._rest, self._in_head = b"", False
        return data[end + 4 :]

    def _chunks(self, data: bytes, now_s: float) -> None:
        """Take the complete chunks of a chunked body from the data; an incomplete one waits for more. An empty chunk
        ends the answer. Raises ValueError for a malformed size."""
        if self._rest:
            data = self._rest + data
        position, length = 0, len(data)
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            size = _length(data[position:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if end + 2 > length:
                break
            if size == 0:
                self._end()
                return
            self._payload(data[line_end + 2 : end], now_s)
            position = end + 2
        self._rest = data[position:]

    def _plain(self, data: bytes, now_s: float) -> None:
        """Take a body without chunks, and end the answer when Content-Length bytes have come. Without a length, the
        body ends with the connection."""
        if data:
            self._payload(data, now_s)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end()

    def _payload(self, payload: bytes, now_s: float) -> None:
        """Take server-sent events from the body, and record each in the outcome: a choice with its number of token ids,
        the usage, or an error. An event with a role and an empty content, as a chat's first one, is skipped; one with
        only a finish reason counts. With `keep_events`, the outcome also gets the text of each event but that one and
        `[DONE]`. An incomplete event waits for more. Of an answer other than 200, the first 2000 bytes are kept for its
        error."""
        if self._status != 200:
            self._body = (self._body + payload)[:_MAX_ERROR_BYTES]
            return
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n")
        events = (self._event + payload).split(b"\n\n")
        self._event = events.pop()
        outcome = self._outcome
        for event in events:
            if b'"choices":[{' in event or b'"choices": [{' in event:
                if b'"content":""' in event and b'"role"' in event:
                    continue  # a chat's opening says who speaks, and nothing yet
                outcome.add_event(now_s)
                if b'"token_ids"' in event and (ids := _TOKEN_IDS.search(event)) is not None:
                    outcome.told_tokens.append(ids[1].count(b",") + 1 if ids[1] else 0)
            if b'"usage":{' in event or b'"usage": {' in event:
                outcome.set_usage(*_usage(event))
            elif event.startswith((b'data: {"error"', b"event: error")):
                outcome.fail(event[:_MAX_ERROR_BYTES].decode("utf-8", "replace"))
            if self._keep_events and event != b"data: [DONE]":
                outcome.events.append(event.decode("utf-8", "replace"))

    def _end(self) -> None:
        """Complete the outcome, as failed if the status is not 200, and the future. `reusable` becomes true unless the
        answer's head said `Connection: close`, or the connection was lost."""
        outcome = self._outcome
        if self._status != 200:
            outcome.fail(f"HTTP {self._status}: {self._body.decode('utf-8', 'replace')}")
        else:
            outcome.end()
        self.reusable = self._keep
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _length(text: bytes, base: int = 10) -> int:
    """Return the number of bytes that a head or a chunk names. Raises ValueError for another text, or a negative
    number, with which the reader would go backwards."""
    length = int(text, base)
    if length < 0:
        raise ValueError(f"a length of {length}")
    return length


def _usage(event: bytes) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of output tokens that an event with a usage has. Raises _MalformedUsage
    if it is not JSON, or a number is missing or is no integer."""
    try:
        usage = json.loads(event[5:])["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        counts = None, None
    prompt_tokens, output_tokens = counts
    if type(prompt_tokens) is not int or type(output_tokens) is not int:
        shown = event[:_MAX_ERROR_BYTES].decode("utf-8", "replace")
        raise _MalformedUsage(f"the usage has no prompt_tokens and completion_tokens: {shown}")
    return prompt_tokens, output_tokens
