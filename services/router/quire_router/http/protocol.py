"""uvicorn's httptools protocol with the bounds that it lacks: on the bytes of a request's head, and on their time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """A connection that sends no complete head within time and size is answered 400 and closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower, as in uvicorn
        """The first head is awaited from here on; before later ones, uvicorn's keep-alive timeout runs."""
        super().connection_made(transport)
        self._start_head()

    def data_received(self, data: bytes) -> None:
        """Count what arrives while the head is not complete."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._end_head()
            self._refuse("Request head too large.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if not self._in_head:
            self._start_head()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._end_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._end_head()
        super().connection_lost(exc)

    def _start_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, "Request head too slow.")

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, reason: str) -> None:
        if not self.transport.is_closing():
            self.send_400_response(reason)
