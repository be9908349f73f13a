"""/v1/messages: Anthropic's message objects, and its events in its order: message_start .. message_stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.error_shape import anthropic_error
from quire_router.sequences.delta import LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta

_BLOCK_START = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
_DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


class MessagesFormat:
    """Implements AnswerFormat. There is one choice, with one block of text."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self._generation = generation
        self._asked = parsed.job.default_max_tokens or 0
        self._final_delta: Delta | None = None

    def opening(self) -> bytes:
        """Return the first events: the message without its text, the beginning of its text block, and a ping."""
        message = self._message([], None, 0)
        started = event("message_start", {"type": "message_start", "message": message})
        return started + event("content_block_start", _BLOCK_START) + event("ping", {"type": "ping"})

    def frame(self, delta: Delta) -> bytes:
        """Return the delta's text as an event; nothing where it has none. Remembers the delta that ends the message."""
        if delta.finish:
            self._final_delta = delta
        return _DELTA_HEAD + orjson.dumps(delta.text) + b"}}\n\n" if delta.text else b""

    def closing(self) -> bytes:
        """Return the last events: the end of the text block, stop reason and usage, the end of the message."""
        changed: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        if self._final_delta is not None:
            changed = self._stop_fields(self._final_delta)
        usage = self._usage(self._generation.usage().completion_tokens)
        return b"".join(
            (
                event("content_block_stop", {"type": "content_block_stop", "index": 0}),
                event("message_delta", {"type": "message_delta", "delta": changed, "usage": usage}),
                event("message_stop", {"type": "message_stop"}),
            )
        )

    def failed(self, error: QuireError) -> bytes:
        """Return the error as an event, which is the stream's last."""
        return event("error", anthropic_error(error, self._generation.caller.request_id))

    async def settle(self) -> None:
        """Do nothing: messages are not kept."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole message as JSON."""
        (delta,) = deltas
        content = [{"type": "text", "text": delta.text}] if delta.text else []
        return orjson.dumps(self._message(content, delta, self._generation.usage().completion_tokens))

    def _message(self, content: list[dict[str, str]], final_delta: Delta | None, output_tokens: int) -> dict[str, Any]:
        """Build Anthropic's message object. `final_delta` is the delta that has the stop reason; None at the start."""
        return {
            "id": f"msg_{self._generation.caller.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.served.name,
            "content": content,
            **(
                self._stop_fields(final_delta)
                if final_delta is not None
                else {"stop_reason": None, "stop_sequence": None}
            ),
            "usage": self._usage(output_tokens),
        }

    def _stop_fields(self, final_delta: Delta) -> dict[str, str | None]:
        """Return Anthropic's stop_reason and stop_sequence. An answer that ended by length with fewer tokens than the
        client's max_tokens has filled the context window."""
        if final_delta.finish == LENGTH:
            cut = self._generation.usage().completion_tokens < self._asked
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if isinstance(final_delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": final_delta.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        """Return Anthropic's usage, in which input_tokens are those that no cache had."""
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": output_tokens,
        }


def event(name: str, data: dict[str, Any]) -> bytes:
    """Return a named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
