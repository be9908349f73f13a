"""Builds the output items of a response (messages, reasoning and function calls), and their stream events.

Each part of an answer extends the open item. A part of another kind or another call ends it and begins the next item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.finish import PartKind
from quire_router.front.call_ids import call_id

if TYPE_CHECKING:
    from quire_router.sequences.delta import TextPart

Event = tuple[str, dict[str, Any]]


class OutputItems:
    """Output of one response. `items` are the ended items, in OpenAI's form."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id.removeprefix("resp_")
        self.items: list[dict[str, Any]] = []
        # Kind and call of the part whose item is open, and the item.
        self._open: tuple[int, int] | None = None
        self._item: dict[str, Any] = {}
        # Pieces of the open item's text or arguments, and the logprobs of its text.
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def begun(self) -> bool:
        """Whether the output has an item, ended or open."""
        return bool(self.items) or self._open is not None

    def add(self, part: TextPart, logprobs: list[Any]) -> list[Event]:
        """Append a part to the open item; return its stream events, each with its name and fields. A part of another
        block first ends the open item and begins one. A tool's name only begins an item. `logprobs` belong to the text
        of a message."""
        events: list[Event] = []
        if self._open != part.block:
            events += [*self.end("completed"), *self._begin(part)]
        if part.kind == PartKind.TOOL_NAME:
            return events
        if part.kind == PartKind.TOOL_ARGUMENTS:
            self._texts.append(part.text)
            place = {"item_id": self._item["id"], "output_index": len(self.items)}
            return [*events, ("response.function_call_arguments.delta", {**place, "delta": part.text})]
        self._texts.append(part.text)
        if part.kind == PartKind.REASONING:
            return [*events, ("response.reasoning_text.delta", {**self._place(), "delta": part.text})]
        self._logprobs += logprobs
        fields = {**self._place(), "logprobs": logprobs, "delta": part.text}
        return [*events, ("response.output_text.delta", fields)]

    def end(self, status: str) -> list[Event]:
        """End the open item with this status, and move it to `items` with its whole text or arguments. Returns its last
        events; empty if no item is open."""
        if self._open is None:
            return []
        (kind, _), self._open = self._open, None
        item, index, text = self._item, len(self.items), "".join(self._texts)
        item["status"] = status
        place = self._place()
        self.items.append(item)
        done: Event = ("response.output_item.done", {"output_index": index, "item": item})
        if kind == PartKind.TOOL_ARGUMENTS:
            item["arguments"] = text
            told = {"item_id": item["id"], "output_index": index, "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", told), done]
        (part,) = item["content"]
        part["text"] = text
        ended: Event = ("response.content_part.done", {**place, "part": part})
        if kind == PartKind.REASONING:
            return [("response.reasoning_text.done", {**place, "text": text}), ended, done]
        part["logprobs"] = self._logprobs
        told = {**place, "text": text, "logprobs": self._logprobs}
        return [("response.output_text.done", told), ended, done]

    def message(self) -> dict[str, Any]:
        """Return the ended items as one assistant message for the chat template: joined text, reasoning and tool
        calls."""
        texts = [item["content"][0]["text"] for item in self.items if item["type"] == "message"]
        thoughts = [item["content"][0]["text"] for item in self.items if item["type"] == "reasoning"]
        calls = [tool_call(item) for item in self.items if item["type"] == "function_call"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return message | ({"tool_calls": calls} if calls else {})

    def _begin(self, part: TextPart) -> list[Event]:
        """Open an item for a part (a function call, reasoning or a message), with its id and no text yet. Returns its
        first events."""
        kind, _ = self._open = part.block
        self._texts, self._logprobs = [], []
        number = f"_{len(self.items)}" if self.items else ""
        if kind == PartKind.TOOL_ARGUMENTS:
            self._item = {
                "id": f"fc_{self._id}{number}",
                "type": "function_call",
                "call_id": f"call_{call_id(self._id, 0, part.call)}",
                "name": part.text if part.kind == PartKind.TOOL_NAME else "",
                "arguments": "",
                "status": "in_progress",
            }
            return [("response.output_item.added", {"output_index": len(self.items), "item": dict(self._item)})]
        if kind == PartKind.REASONING:
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            self._item = {"id": f"rs_{self._id}{number}", "type": "reasoning", "summary": []}
        else:
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._item = {"id": f"msg_{self._id}{number}", "type": "message", "role": "assistant"}
        self._item |= {"status": "in_progress", "content": []}
        added: Event = ("response.output_item.added", {"output_index": len(self.items), "item": {**self._item}})
        self._item["content"] = [content]
        return [added, ("response.content_part.added", {**self._place(), "part": {**content}})]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items), "content_index": 0}


def tool_call(item: dict[str, Any]) -> dict[str, Any]:
    """Convert a function_call item to a tool call of a chat message."""
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
