"""Content, reasoning and tool calls of a chat answer as OpenAI's JSON, with vLLM's fields for reasoning."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from quire_common.finish import PartKind
from quire_router.front.call_ids import call_id
from quire_router.sequences.delta import STOP, TextPart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_router.sequences.delta import Delta
    from quire_router.sequences.job import Wants


def shown_parts(delta: Delta, wants: Wants) -> list[TextPart]:
    """Return the parts of a delta that the client wants. Reasoning is left out unless `wants.reasoning`. Calls after
    the answer's first call are left out unless `wants.parallel_calls`. A delta that was not parsed has its text as one
    content part, or no part if it is empty."""
    parts = delta.parts
    if parts is None:
        return [TextPart(PartKind.CONTENT, -1, delta.text)] if delta.text else []
    if wants.reasoning and wants.parallel_calls:
        return parts
    return [
        part
        for part in parts
        if (wants.reasoning or part.kind != PartKind.REASONING) and (wants.parallel_calls or part.call < 1)
    ]


def whole_blocks(parts: Iterable[TextPart]) -> list[tuple[TextPart, str]]:
    """Join the parts of a whole answer by block: adjacent content, reasoning, or one tool call. Returns the first part
    of each block and its text, which for a call is its arguments; the first part has the name."""
    blocks = []
    for _, same in groupby(parts, key=lambda part: part.block):
        first, *rest = same
        text = "".join(part.text for part in rest)
        blocks.append((first, text if first.kind == PartKind.TOOL_NAME else first.text + text))
    return blocks


class MessageParts:
    """Converts the answers of one generation. Remembers which choices have called a tool."""

    def __init__(self, request_id: str, wants: Wants) -> None:
        self._request_id = request_id
        self._wants = wants
        self._called: set[int] = set()

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the `delta` objects of a delta's parts, in order: each has content, reasoning (as `reasoning` and as
        `reasoning_content`) or a piece of one tool call. Adjacent pieces of one call are joined. Empty if no part is
        shown. If a tool call begins, `finish` later says that the choice has called a tool."""
        shown: list[dict[str, Any]] = []
        for part in self._shown(delta):
            if part.kind == PartKind.CONTENT:
                shown.append({"content": part.text})
            elif part.kind == PartKind.REASONING:
                shown.append({"reasoning": part.text, "reasoning_content": part.text})
            elif part.kind == PartKind.TOOL_NAME:
                function = {"name": part.text, "arguments": ""}
                shown.append({"tool_calls": [{"index": part.call, **self._call(delta.index, part.call, function)}]})
            elif shown and shown[-1].get("tool_calls", [{}])[0].get("index") == part.call:
                shown[-1]["tool_calls"][0]["function"]["arguments"] += part.text
            else:
                shown.append({"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]})
        return shown

    def message(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of the `message` of a whole answer: content, a null refusal, and reasoning and tool calls
        if there are any. Content is null if the answer has calls and no text. A call is remembered for `finish`."""
        blocks = whole_blocks(self._shown(delta))
        content = "".join(text for part, text in blocks if part.kind == PartKind.CONTENT)
        reasoning = "".join(text for part, text in blocks if part.kind == PartKind.REASONING)
        calls = [
            self._call(delta.index, part.call, {"name": part.text, "arguments": text})
            for part, text in blocks
            if part.kind == PartKind.TOOL_NAME
        ]
        message: dict[str, Any] = {"content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = calls
        return message

    def finish(self, delta: Delta, name: str | None) -> str | None:
        """Return the finish reason for the client: `tool_calls` if the choice has called a tool and ended with the
        reason `stop`, else `name`, which is the reason in other cases."""
        return "tool_calls" if delta.finish == STOP and delta.index in self._called else name

    def _shown(self, delta: Delta) -> list[TextPart]:
        """Return the parts of a delta that the client wants. If a tool call begins in them, add the choice to those
        that have called a tool."""
        parts = shown_parts(delta, self._wants)
        if any(part.kind == PartKind.TOOL_NAME for part in parts):
            self._called.add(delta.index)
        return parts

    def _call(self, choice: int, call: int, function: dict[str, str]) -> dict[str, Any]:
        """Return OpenAI's object for the call with index `call` of the answer with index `choice`; its id is the same
        in every delta."""
        return {"id": call_id(self._request_id, choice, call), "type": "function", "function": function}
