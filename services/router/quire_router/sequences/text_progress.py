"""The text that tokenizers have made of one sequence's tokens. Only the Detokenize stream that has the sequence writes
it."""

from __future__ import annotations

from collections import deque

from quire_common.finish import PartKind
from quire_router.sequences.delta import TextPart

_CONTENT, _NO_CALL = PartKind.CONTENT.value, -1


class TextProgress:
    """The tokenizer's progress with one sequence. The tokenizer has answered for the first `confirmed` tokens; their
    text has `chars_sent` characters. It answers each row once, and `rows_back` counts the answers."""

    __slots__ = (
        "_parts",
        "_parts_end",
        "chars_sent",
        "confirmed",
        "detokenize_rows",
        "detokenize_us",
        "more_rows",
        "offsets",
        "reasoning_tokens",
        "rows_back",
        "strikes",
    )

    def __init__(self) -> None:
        self.rows_back = 0
        # The number of rows that were sent to the tokenizer, minus the number of the engine's rows. The numbers differ
        # because rows are cut, joined, and sent again.
        self.more_rows = 0
        self.confirmed = 0
        self.chars_sent = 0
        # Characters of output after each token, where logprobs were asked for.
        self.offsets: list[int] = []
        # Tokenizers in a row that were lost while they worked on the sequence.
        self.strikes = 0
        self.detokenize_us = 0.0
        self.detokenize_rows = 0
        self.reasoning_tokens = 0
        # (kind, call, characters) of the text parts that are in no delta yet; None: all text is content. The last part
        # ends at character `_parts_end` of the text, which may be after `chars_sent`.
        self._parts: deque[tuple[int, int, int]] | None = None
        self._parts_end = 0

    def start_after(self, tokens: int, characters: int, *, with_offsets: bool) -> None:
        """Begin after the tokens and characters that the client has from an earlier, broken stream. With
        `with_offsets`, these tokens get the offset 0 as a placeholder."""
        self.confirmed, self.chars_sent = tokens, characters
        self._parts_end = characters
        if with_offsets:
            self.offsets = [0] * tokens

    def add_rows(self, more: int) -> None:
        """Count rows that were added because a row was cut. A negative number counts rows that were saved by
        joining."""
        self.more_rows += more

    def reopen(self, rows: int, engine_rows: int, *, begins: bool) -> None:
        """Set how many answers to expect from a new stream. The engine's `engine_rows` rows were sent on this stream as
        `rows` rows so far. With `begins`, the tokenizer has answered none of them."""
        if begins:
            self.rows_back = 0
        self.more_rows = rows - engine_rows

    def add_answer(self, characters: int, used: int, us: float) -> None:
        """Add the answer to a row. `used` is the number of the row's tokens that count, and `characters` is the length
        of their text. `us` is the tokenizer's time for the row, in microseconds."""
        self.rows_back += 1
        self.confirmed += used
        self.chars_sent += characters
        self.detokenize_us += us
        self.detokenize_rows += 1

    def add_offsets(self, offsets: list[int]) -> None:
        """Add the offsets of the tokens of a row that count."""
        self.offsets += offsets

    def add_part(self, kind: int, call: int, characters: int) -> None:
        """Append a part of the text that the tokenizer sends now or later. `kind` is a PartKind, `call` the index of
        the tool call (-1: none), and `characters` the part's length."""
        if self._parts is None:
            self._parts = deque()
        self._parts.append((kind, call, characters))
        self._parts_end += characters

    def forget_early_parts(self) -> None:
        """Remove the parts of text that has not come yet, and cut a part that has come only partly. Another tokenizer
        will send this text again, with its parts."""
        early = self._parts_end - self.chars_sent
        while self._parts and early > 0:
            kind, call, characters = self._parts.pop()
            if characters > early:
                self._parts.append((kind, call, characters - early))
            early -= characters
        self._parts_end = self.chars_sent

    def take_parts(self, text: str) -> list[TextPart] | None:
        """Remove and return the parts of this text, which goes into a delta; None if no part has come for the sequence,
        as for a text that is not parsed. Neighbours of one kind and tool call are joined, and text beyond the known
        parts is content."""
        if self._parts is None:
            return None
        taken: list[TextPart] = []
        at = 0
        while at < len(text):
            kind, call, characters = self._parts.popleft() if self._parts else (_CONTENT, _NO_CALL, len(text) - at)
            piece = text[at : at + characters]
            if len(piece) < characters:
                self._parts.appendleft((kind, call, characters - len(piece)))
            at += len(piece)
            if taken and (taken[-1].kind, taken[-1].call) == (kind, call):
                piece = taken.pop().text + piece
            taken.append(TextPart(kind, call, piece))
        return taken

    def set_reasoning_tokens(self, tokens: int) -> None:
        """Note how many tokens of reasoning the answer has by now."""
        self.reasoning_tokens = tokens

    def add_strike(self) -> int:
        """Count a tokenizer that was lost while it worked on the sequence. Returns the number of such losses in a
        row."""
        self.strikes += 1
        return self.strikes

    def clear_strikes(self) -> None:
        """Forget the lost tokenizers, because a tokenizer has answered."""
        self.strikes = 0
