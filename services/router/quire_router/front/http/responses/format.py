"""A generation as a response object or as OpenAI's typed events, each with its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.logprob_format import TokenNames, chat_tokens
from quire_router.front.http.formats.messages_format import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.responses.document import ResponseDocument
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class ResponsesFormat:
    """Implements AnswerFormat. `keep` is given the object at the end, and its text, before the client is told."""

    def __init__(
        self,
        generation: Generation,
        document: ResponseDocument,
        keep: Callable[[dict[str, Any], str], Awaitable[None]],
    ) -> None:
        self._generation = generation
        self._document = document
        self._keep = keep
        self._wants_logprobs = generation.job.sampling.logprobs >= 0
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._finish = 0
        self._number = 0
        self._ended: dict[str, Any] = {}
        place = {"item_id": document.item_id, "output_index": 0, "content_index": 0}
        name = b"response.output_text.delta"
        self._head = b'event: %b\ndata: {"type":"%b",%b,' % (name, name, orjson.dumps(place)[1:-1])

    def opening(self) -> bytes:
        """Return the first events: the response without output, its message, and the message's empty text part."""
        item, part = self._document.item("in_progress", []), self._document.part("", [])
        return b"".join(
            (
                self._event("response.created", response=self._document.running()),
                self._event("response.in_progress", response=self._document.running()),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=part),
            )
        )

    def frame(self, delta: Delta) -> bytes:
        """Return the delta's text and logprobs as an event; nothing where it has neither."""
        logprobs = self._collect(delta)
        if not delta.text and not logprobs:
            return b""
        self._number += 1
        return self._head + b'"sequence_number":%d,"logprobs":%b,"delta":%b}\n\n' % (
            self._number - 1,
            orjson.dumps(logprobs),
            orjson.dumps(delta.text),
        )

    def closing(self) -> bytes:
        """Return the last events: the text, its part, its message and the response, each whole."""
        self._end()
        text, part = "".join(self._texts), self._document.part("".join(self._texts), self._logprobs)
        (item,) = self._ended["output"]
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{self._ended['status']}", response=self._ended),
            )
        )

    def failed(self, error: QuireError) -> bytes:
        """Return the failed response as an event."""
        return self._event("response.failed", response=self._document.failed(error))

    async def settle(self) -> None:
        """Keep the ended response, before the client is told of its end and may ask for it."""
        await self._keep(self._ended, "".join(self._texts))

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole response as JSON."""
        for delta in deltas:
            self._collect(delta)
        self._end()
        return orjson.dumps(self._ended)

    def _collect(self, delta: Delta) -> list[Any]:
        """Collect a delta's text, logprobs and finish reason; return its logprobs, none where they were not asked
        for."""
        self._texts.append(delta.text)
        self._finish = delta.finish
        if not self._wants_logprobs:
            return []
        found: list[Any] = chat_tokens(delta.entries, TokenNames(self._generation.token_bytes, by_id=False))
        self._logprobs += found
        return found

    def _end(self) -> None:
        """Make the ended response object of all that was collected."""
        usage = self._generation.usage()
        self._ended = self._document.ended("".join(self._texts), self._logprobs, self._finish, usage)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._document.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        """Return an event under the next sequence number."""
        self._number += 1
        return event(name, {"type": name, "sequence_number": self._number - 1, **fields})
