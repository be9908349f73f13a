"""The format of /v1/messages: Anthropic's message objects, and its events in its order, from message_start to
message_stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_common.finish import PartKind
from quire_router.front.call_ids import call_id
from quire_router.front.http.formats.error_shape import anthropic_error
from quire_router.front.http.formats.message_parts import shown_parts, whole_blocks
from quire_router.sequences.delta import LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta, TextPart

_TEXT_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
)


class MessagesFormat:
    """Implements AnswerFormat. There is one choice. Its parts are blocks: text, thinking, and tool use."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self._generation = generation
        self._wants = parsed.job.wants
        # Index, and kind and call, of the open block.
        self._block = -1
        self._streamed: tuple[int, int] | None = None
        self._called = False
        self._asked = parsed.job.default_max_tokens or 0
        self._final_delta: Delta | None = None

    def opening(self) -> bytes:
        """Return the first events: the message without its content, and a ping."""
        message = self._message([], None, 0)
        return event("message_start", {"type": "message_start", "message": message}) + event("ping", {"type": "ping"})

    def frame(self, delta: Delta) -> bytes:
        """Return the events of the delta's parts. Remembers the delta that ends the message."""
        if delta.finish:
            self._final_delta = delta
        return b"".join(map(self._part, self._shown(delta)))

    def _part(self, part: TextPart) -> bytes:
        """Return the events of a part. A part of another block first ends the open block and begins its own. A tool's
        name only begins a block; text, thinking and arguments are deltas of one."""
        begun = b""
        if self._streamed != part.block:
            begun = self._end_block()
            self._block += 1
            self._streamed = part.block
            started = self._empty_block(part)
            begun += event(
                "content_block_start", {"type": "content_block_start", "index": self._block, "content_block": started}
            )
        if part.kind == PartKind.TOOL_NAME:
            return begun
        if part.kind == PartKind.CONTENT:
            return begun + _TEXT_HEAD % self._block + orjson.dumps(part.text) + b"}}\n\n"
        delta = (
            {"type": "thinking_delta", "thinking": part.text}
            if part.kind == PartKind.REASONING
            else {"type": "input_json_delta", "partial_json": part.text}
        )
        return begun + event(
            "content_block_delta", {"type": "content_block_delta", "index": self._block, "delta": delta}
        )

    def _end_block(self) -> bytes:
        """Return the event that ends the open block; empty if no block is open. After this, no block is open."""
        if self._streamed is None:
            return b""
        self._streamed = None
        return event("content_block_stop", {"type": "content_block_stop", "index": self._block})

    def _empty_block(self, part: TextPart) -> dict[str, Any]:
        """Return the block that the part begins, without content: text, thinking, or a tool use with its id and name.
        The API requires a signature in thinking; Quire's is empty."""
        if part.kind == PartKind.CONTENT:
            return {"type": "text", "text": ""}
        if part.kind == PartKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        name = part.text if part.kind == PartKind.TOOL_NAME else ""
        used = call_id(self._generation.caller.request_id, 0, part.call)
        return {"type": "tool_use", "id": f"toolu_{used}", "name": name, "input": {}}

    def _shown(self, delta: Delta) -> list[TextPart]:
        """Return the parts that the client wants, and note whether a tool was called."""
        parts = shown_parts(delta, self._wants)
        self._called = self._called or any(part.kind == PartKind.TOOL_NAME for part in parts)
        return parts

    def closing(self) -> bytes:
        """Return the last events: the end of the block that is open, if one is, stop reason and usage, the end of the
        message. The stop reason is null if no delta has ended the answer."""
        changed: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        if self._final_delta is not None:
            changed = self._stop_fields(self._final_delta)
        usage = self._usage(self._generation.usage().completion_tokens)
        return b"".join(
            (
                self._end_block(),
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
        content = self._blocks(delta)
        return orjson.dumps(self._message(content, delta, self._generation.usage().completion_tokens))

    def _blocks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the blocks of a whole message: text, thinking and tool use. If the arguments of a call are not a JSON
        object (the answer was cut, or the model made an error), the input is empty."""
        blocks: list[dict[str, Any]] = []
        for part, text in whole_blocks(self._shown(delta)):
            block = self._empty_block(part)
            if part.kind == PartKind.CONTENT:
                block["text"] = text
            elif part.kind == PartKind.REASONING:
                block["thinking"] = text
            else:
                block["input"] = _object(text)
            blocks.append(block)
        return blocks

    def _message(self, content: list[dict[str, Any]], final_delta: Delta | None, output_tokens: int) -> dict[str, Any]:
        """Build Anthropic's message object. `final_delta` is the delta that has the stop reason; None at the start.
        `content` are its blocks, and `output_tokens` is for its usage."""
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
        """Return Anthropic's stop_reason and stop_sequence for the delta that ended the message. An end by length is
        `max_tokens`, or `model_context_window_exceeded` if the answer has fewer tokens than the client allowed.
        Otherwise the reason is `stop_sequence` with the matched string, `tool_use` after a tool call, or `end_turn`."""
        if final_delta.finish == LENGTH:
            cut = self._generation.usage().completion_tokens < self._asked
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if isinstance(final_delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": final_delta.stop_reason}
        return {"stop_reason": "tool_use" if self._called else "end_turn", "stop_sequence": None}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        """Return Anthropic's usage, in which input_tokens are those that no cache had; cached tokens are counted
        apart."""
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": output_tokens,
        }


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the text is not one."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def event(name: str, data: dict[str, Any]) -> bytes:
    """Return a named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
