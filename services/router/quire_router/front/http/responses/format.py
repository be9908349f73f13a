"""Writes a generation as a response object, or as OpenAI's typed events with their sequence numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_common.finish import PartKind
from quire_router.front.http.formats.logprob_format import TokenNames, chat_tokens
from quire_router.front.http.formats.message_parts import shown_parts
from quire_router.front.http.formats.messages_format import event
from quire_router.front.http.responses.output_items import OutputItems
from quire_router.sequences.delta import LENGTH, TextPart

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.responses.document import ResponseDocument
    from quire_router.front.http.responses.output_items import Event
    from quire_router.front.http.responses.store import StoreOutcome
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class ResponsesFormat:
    """Implements AnswerFormat. Before the client is sent the end, `keep` receives the response object, and the answer
    as a message of the conversation."""

    def __init__(
        self,
        generation: Generation,
        document: ResponseDocument,
        keep: Callable[[dict[str, Any], dict[str, Any]], Awaitable[StoreOutcome]],
    ) -> None:
        self._generation = generation
        self._document = document
        self._keep = keep
        self._wants = generation.job.wants
        self._wants_logprobs = generation.job.sampling.logprobs >= 0
        self._items = OutputItems(document.id)
        self._finish = 0
        self._number = 0
        self._ended: dict[str, Any] = {}

    def opening(self) -> bytes:
        """Return the first events: the response without output."""
        running = {"response": self._document.running()}
        return self._event("response.created", running) + self._event("response.in_progress", running)

    def frame(self, delta: Delta) -> bytes:
        """Return the events of the delta's parts; empty if it shows no part. An empty delta of an unparsed answer
        counts as a part if it has logprobs."""
        return b"".join(self._event(name, fields) for name, fields in self._collect(delta))

    def closing(self) -> bytes:
        """Return the last events: those of the last item, and the whole response as response.completed or
        response.incomplete. Remembers the ended response for `settle`."""
        told = b"".join(self._event(name, fields) for name, fields in self._end())
        return told + self._event(f"response.{self._ended['status']}", {"response": self._ended})

    def failed(self, error: QuireError) -> bytes:
        """Return the failed response as an event."""
        return self._event("response.failed", {"response": self._document.failed(error)})

    async def settle(self) -> None:
        """Store the ended response before the client learns of its end and may ask for it."""
        await self.keep()

    async def keep(self) -> StoreOutcome:
        """Store the ended response; return the outcome."""
        return await self._keep(self._ended, self._items.message())

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole response as JSON, and remember it for `settle` and `keep`."""
        for delta in deltas:
            self._collect(delta)
        self._end()
        return orjson.dumps(self._ended)

    def _collect(self, delta: Delta) -> list[Event]:
        """Add those of a delta's parts that the client wants (see `shown_parts`) to the output, and return their
        events, each with its name and fields. Remembers the finish reason. The delta's logprobs go with its last
        content part. A delta that was not parsed and has no text gets an empty content part for them. If a parsed delta
        has no content part, its logprobs are left out."""
        self._finish = delta.finish
        logprobs: list[Any] = []
        if self._wants_logprobs:
            logprobs = chat_tokens(delta.entries, TokenNames(self._generation.token_bytes, by_id=False))
        parts = shown_parts(delta, self._wants)
        if not parts and logprobs and delta.parts is None:
            parts = [TextPart(PartKind.CONTENT, -1, "")]
        events: list[Event] = []
        last = max((at for at, part in enumerate(parts) if part.kind == PartKind.CONTENT), default=-1)
        for at, part in enumerate(parts):
            events += self._items.add(part, logprobs if at == last else [])
        return events

    def _end(self) -> list[Event]:
        """Make the ended response object from the collected items; return the events that end the last item, whose
        status is `incomplete` after an end by length, else `completed`. An answer without items becomes an empty
        message, and its first events are returned too."""
        events: list[Event] = []
        if not self._items.begun:
            events += self._items.add(TextPart(PartKind.CONTENT, -1, ""), [])[:-1]
        usage = self._generation.usage()
        events += self._items.end("incomplete" if self._finish == LENGTH else "completed")
        self._ended = self._document.ended(self._items.items, self._finish, usage)
        return events

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        """Return an event under the next sequence number."""
        self._number += 1
        return event(name, {"type": name, "sequence_number": self._number - 1, **fields})
