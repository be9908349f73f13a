"""Makes the deltas of one sequence for its client, and records which output the client has and which output waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.sequences.delta import Delta

if TYPE_CHECKING:
    from quire_router.sequences.engine_progress import EngineProgress
    from quire_router.sequences.job import Wants
    from quire_router.sequences.text_progress import TextProgress


class ClientProgress:
    """The client's side of one sequence. It reads the engine's tokens and the tokenizer's text. The client gets
    `finish` and `stop_reason`; they are 0 and None until the sequence has `ended` for the client."""

    __slots__ = (
        "_characters",
        "_engine",
        "_index",
        "_taken",
        "_text",
        "_with_entries",
        "_with_ids",
        "ended",
        "finish",
        "parts",
        "stop_reason",
        "stream_text",
        "stream_tokens",
    )

    def __init__(
        self, index: int, engine: EngineProgress, text: TextProgress, wants: Wants, *, with_entries: bool
    ) -> None:
        self._index = index
        self._engine = engine
        self._text = text
        self._with_ids = wants.token_ids
        self._with_entries = with_entries
        # Whether new text, or a token without text, is a delta of its own.
        self.stream_text = wants.stream
        self.stream_tokens = wants.stream and (wants.every_token or wants.token_ids or with_entries)
        self.ended = False
        self.finish = 0
        self.stop_reason: str | int | None = None
        # The numbers of tokens and of characters that are in deltas already.
        self._taken = 0
        self._characters = 0
        # Text that waits for the next delta.
        self.parts: list[str] = []

    def start_after(self, tokens: int, characters: int) -> None:
        """Begin after the tokens and characters that the client has from an earlier, broken stream."""
        self._taken, self._characters = tokens, characters

    def end(self, finish: int, stop_reason: str | int | None) -> None:
        """Set the finish reason and stop reason that the client gets. No output may be added after this call; output
        that waits can still be taken."""
        self.ended, self.finish, self.stop_reason = True, finish, stop_reason

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the next delta."""
        return self._text.confirmed - self._taken

    def take_delta(self, most_tokens: int | None = None) -> Delta:
        """Return the output since the last call, as far as its text has come, as a delta, perhaps with the finish
        reason. Tokens that no tokenizer has answered yet stay for a later call. A delta of more than `most_tokens`
        tokens is cut if its tokens have character offsets, as with logprobs; None: it is never cut; the next calls
        return the rest and the end."""
        start, end = self._taken, self._text.confirmed
        text = self.parts[0] if len(self.parts) == 1 else "".join(self.parts)
        self.parts = []
        finish, stop_reason = self.finish, self.stop_reason
        if most_tokens is not None and end - start > most_tokens and len(offsets := self._text.offsets) >= end:
            end, finish, stop_reason = start + most_tokens, 0, None
            characters = max(0, offsets[end - 1] - self._characters)
            text, rest = text[:characters], text[characters:]
            self.parts = [rest] if rest else []
        self._taken = end
        self._characters += len(text)
        return Delta(
            self._index,
            text,
            end - start,
            bytes(self._engine.output_ids[4 * start : 4 * end]) if self._with_ids else b"",
            self._engine.entries[start:end] if self._with_entries else [],
            self._text.offsets[start:end] if self._with_entries else [],
            finish,
            stop_reason,
            self._text.take_parts(text),
        )
