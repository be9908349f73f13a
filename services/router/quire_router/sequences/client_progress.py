"""What the client of one sequence has been given, and what waits for it. The sequence's deltas alone change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.sequences.job import Wants


class ClientProgress:
    """`taken` tokens are in deltas. `finish` and `stop_reason` are the client's; 0 and None until it has `ended`."""

    __slots__ = ("_parts", "ended", "finish", "stop_reason", "stream_text", "stream_tokens", "taken")

    def __init__(self, wants: Wants, *, with_entries: bool) -> None:
        # Whether new text, or a token without text, is a delta of its own.
        self.stream_text = wants.stream
        self.stream_tokens = wants.stream and (wants.every_token or wants.token_ids or with_entries)
        self.ended = False
        self.finish = 0
        self.stop_reason: str | int | None = None
        self.taken = 0
        self._parts: list[str] = []

    def start_after(self, tokens: int) -> None:
        """Begin behind what the client of a broken stream has."""
        self.taken = tokens

    def add_text(self, text: str) -> None:
        """Keep it until the client's next delta."""
        self._parts.append(text)

    def end(self, finish: int, stop_reason: str | int | None) -> None:
        """Nothing comes after this."""
        self.ended, self.finish, self.stop_reason = True, finish, stop_reason

    def take_text(self, tokens: int) -> str:
        """All text that waits; the client then has so many tokens."""
        self.taken = tokens
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else "".join(parts)
