"""What tokenizers have made of one sequence's tokens. The Detokenize stream that has the sequence alone writes it."""

from __future__ import annotations

from collections import deque

from quire_common.finish import PartKind
from quire_router.sequences.delta import TextPart

_CONTENT, _NO_CALL = PartKind.CONTENT.value, -1


class TextProgress:
    """`confirmed` tokens count; their text has `chars_sent` characters. A row is answered once by the tokenizer."""

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
        # Rows that the tokenizer answers beside those of the engine: rows are cut, joined, and sent again.
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
        # Kind, call and characters of what is not in a delta yet; None: all text is content. They end at this character
        # of the text, which may be ahead of `chars_sent`.
        self._parts: deque[tuple[int, int, int]] | None = None
        self._parts_end = 0

    def start_after(self, tokens: int, characters: int, *, with_offsets: bool) -> None:
        """Begin behind the tokens and characters that the client of a broken stream has."""
        self.confirmed, self.chars_sent = tokens, characters
        self._parts_end = characters
        if with_offsets:
            self.offsets = [0] * tokens

    def add_rows(self, more: int) -> None:
        """Count rows that were added by cutting; negative: that were saved by joining."""
        self.more_rows += more

    def reopen(self, rows: int, engine_rows: int, *, begins: bool) -> None:
        """Set how many answers to expect of a new stream: it has got the unconfirmed tokens of `engine_rows` rows in
        `rows` rows so far. `begins`: none of them is answered."""
        if begins:
            self.rows_back = 0
        self.more_rows = rows - engine_rows

    def add_answer(self, characters: int, used: int, us: float) -> None:
        """Add the answer to a row: `used` of its tokens count, with so many characters. `us`: the tokenizer's time for
        it."""
        self.rows_back += 1
        self.confirmed += used
        self.chars_sent += characters
        self.detokenize_us += us
        self.detokenize_rows += 1

    def add_offsets(self, offsets: list[int]) -> None:
        """Add the offsets of those tokens of a row that count."""
        self.offsets += offsets

    def add_part(self, kind: int, call: int, characters: int) -> None:
        """Add a part of the text that the tokenizer sends now or later. `kind` is a PartKind."""
        if self._parts is None:
            self._parts = deque()
        self._parts.append((kind, call, characters))
        self._parts_end += characters

    def forget_early_parts(self) -> None:
        """Forget the parts of text that did not come: another tokenizer sends it, with its parts."""
        early = self._parts_end - self.chars_sent
        while self._parts and early > 0:
            kind, call, characters = self._parts.pop()
            if characters > early:
                self._parts.append((kind, call, characters - early))
            early -= characters
        self._parts_end = self.chars_sent

    def take_parts(self, text: str) -> list[TextPart] | None:
        """Return the parts of this text, which goes into a delta; None where it was not parsed."""
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

    def strike(self) -> int:
        """Count a tokenizer that was lost while it worked on the sequence; return how many there were in a row."""
        self.strikes += 1
        return self.strikes

    def clear_strikes(self) -> None:
        """Forget lost tokenizers, since one has answered."""
        self.strikes = 0
