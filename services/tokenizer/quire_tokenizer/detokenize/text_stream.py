"""Turns the tokens of one request into text: decodes them, holds back text that may become a stop string, cuts the text
at stop strings, and counts tokens and characters.

The text, the cut and the counts do not depend on how tokens were grouped into rows. This module knows nothing of
streams, handles or protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument
from quire_tokenizer.detokenize.stop_matcher import StopMatcher
from quire_tokenizer.output_parsing.parsed_decoder import ParsedDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_tokenizer.detokenize.incremental_decoder import TextDecoder
    from quire_tokenizer.detokenize.stop_matcher import StopStrings
    from quire_tokenizer.output_parsing.parts import Part

FINISH_NONE, FINISH_STOP = 0, 1


@dataclass(frozen=True, slots=True)
class StopRules:
    """The rules by which a text is cut."""

    stops: StopStrings | None = None
    # A last token of these, where the engine says that it stopped, is not shown.
    hidden_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    # Stop strings that complete within this many tokens do not count.
    min_tokens: int = 0


class TextStream:
    """The state of one request: prior tokens may be replayed first, then `advance` takes the rows. After a row that
    finishes or has a match, it must be forgotten."""

    __slots__ = (
        "_backlog",
        "_count",
        "_decoder",
        "_matched",
        "_matcher",
        "_parsed",
        "_rules",
        "_seen",
        "_sent",
        "_unseen",
        "is_parsed",
        "offsets",
        "used_tokens",
    )

    def __init__(self, decoder: TextDecoder, rules: StopRules, *, want_offsets: bool = False) -> None:
        self._decoder = decoder
        self._parsed = decoder if isinstance(decoder, ParsedDecoder) else None
        self.is_parsed = self._parsed is not None
        self._rules = rules
        self._matcher = StopMatcher(rules.stops) if rules.stops is not None else None
        self._backlog: list[str] = []
        self._unseen = 0  # characters that were sent elsewhere, and are yet to be passed over
        self._count = 0  # tokens fed
        self._seen = 0  # characters decoded
        self._sent = 0  # characters given out, but for the backlog
        self._matched = False
        self.used_tokens = 0
        # Characters of output after each used token of the last row; None where nobody asked.
        self.offsets: list[int] | None = [] if want_offsets else None

    def resume(self, prior_ids: Sequence[int], chars_sent: int) -> None:
        """Take up a text whose tokens were seen elsewhere. What was not sent comes with the first row. Raises
        RESUME_MISMATCH if the tokens have less text than `chars_sent` characters."""
        self.begin_replay(chars_sent)
        self.replay(prior_ids)
        self.end_replay()

    def begin_replay(self, chars_sent: int) -> None:
        """Begin what `resume` does, in parts: after this, call `replay` for each part of the prior tokens, then
        `end_replay`. `chars_sent` is the number of characters that were sent to the client elsewhere."""
        self._unseen = chars_sent

    def replay(self, prior_ids: Sequence[int]) -> None:
        """Feed some of the prior tokens, which came before this stream was opened. The characters that were sent to the
        client are passed over, with their parts. Text after them goes into the backlog."""
        backlog, self._backlog = self._backlog, []
        text, _, _ = self.advance(prior_ids, FINISH_NONE)
        seen = min(self._unseen, len(text))
        self._unseen -= seen
        if self._parsed is not None:
            self._parsed.take_parts(seen)
        self._backlog = [*backlog, text[seen:]] if seen < len(text) else backlog

    def end_replay(self) -> None:
        """End the replay. Raises RESUME_MISMATCH if the prior tokens have less text than was sent. Offsets of the prior
        tokens are dropped."""
        if self._unseen:
            raise InvalidArgument(
                "RESUME_MISMATCH",
                f"The prior tokens make {self._unseen} characters fewer than were sent.",
                "Send all prior ids, with the options that the request had from its start.",
                param="chars_sent",
            )
        if self.offsets is not None:
            self.offsets = []

    @property
    def backlog_chars(self) -> int:
        """The number of characters of prior tokens that come with the next row."""
        return sum(map(len, self._backlog))

    @property
    def fed_tokens(self) -> int:
        """The number of tokens so far, with the prior tokens."""
        return self._count

    def advance(self, ids: Sequence[int], finish: int) -> tuple[str, int, int]:
        """Feed the tokens of a row, and end the text if `finish` is set. Returns the text to send (first the backlog of
        a replay, if there is one); the index of the stop string that matched, or -1; and how many of `ids` count. With
        FINISH_STOP, a stop token at the end counts (unless a stop string matched before it), but is not shown without
        `include_stop`. After a match within the prior tokens, no ids count. If offsets are wanted, sets `offsets` to
        the number of characters decoded so far (with prior tokens and held text) after each of the ids that count; at a
        match, the last is at most the number of characters sent."""
        if self._matched:  # within the prior tokens
            return self._take_backlog(""), self._stop_index, 0
        hidden = finish == FINISH_STOP and len(ids) > 0 and self._hides(ids[-1])
        shown = ids[:-1] if hidden else ids
        ends: list[int] | None = [] if self.offsets is not None else None
        if len(shown) == 1 and self._matcher is None and ends is None:
            self._count += 1
            text = self._decoder.feed(shown[0])
            self._seen += len(text)
            used = 1
        else:
            text, used = self._feed_all(shown, ends)
        if not self._matched:
            if hidden:
                used += 1
                self._count += 1
            if finish:
                text += self._finish()
            if hidden and ends is not None:
                ends.append(self._seen)
            elif finish and ends:
                ends[-1] = self._seen
        self._sent += len(text)
        self.used_tokens += used
        if ends is not None:
            if self._matched and ends:
                # Of the last alone: a token before it may have been told in a row before it, when nothing was cut yet.
                ends[-1] = min(ends[-1], self._sent)
            self.offsets = ends
        if self._backlog:
            text = self._take_backlog(text)
        return text, self._stop_index, used

    def take_parts(self, chars: int) -> list[Part]:
        """Return the parts of a text of `chars` characters that `advance` has returned; empty if there is no parser."""
        return self._parsed.take_parts(chars) if self._parsed is not None else []

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return self._parsed.reasoning_tokens if self._parsed is not None else 0

    @property
    def parsers(self) -> tuple[tuple[str, str], ...]:
        """The kind and name of each parser of the text."""
        return self._parsed.parsers if self._parsed is not None else ()

    @property
    def parse_failures(self) -> Sequence[str]:
        """Return the faults of the tool calls of the text."""
        return self._parsed.failures if self._parsed is not None else ()

    @property
    def chars(self) -> int:
        """The number of characters that were returned so far, with those of the prior tokens."""
        return self._sent

    @property
    def _stop_index(self) -> int:
        return self._matcher.stop_index if self._matched and self._matcher is not None else -1

    def _feed_all(self, ids: Sequence[int], ends: list[int] | None) -> tuple[str, int]:
        """Feed tokens, up to the one with which a stop string matches. Returns the text to send, and the number of
        tokens that were fed. After each token, appends the number of decoded characters to `ends`, unless that is
        None."""
        texts = []
        for used, token_id in enumerate(ids, 1):
            self._count += 1
            text = self._decoder.feed(token_id)
            if text:
                self._seen += len(text)
                texts.append(self._release(text) if self._matcher is not None else text)
            if ends is not None:
                ends.append(self._seen)
            if self._matched:
                return "".join(texts), used
        return "".join(texts), len(ids)

    def _release(self, text: str) -> str:
        """Search new text for stop strings. Returns the text that may be sent now: the text up to the match or, without
        a match, all text but the end that may become a stop string. The stop string itself is sent only with
        `include_stop`. Matches that end within the first `min_tokens` tokens do not count."""
        matcher = self._matcher
        if matcher is None:
            return text
        held = matcher.held
        end = matcher.feed(text, self._count > self._rules.min_tokens)
        whole = held + text
        if end >= 0:
            end += len(held)
            self._matched = True
            return whole[: end if self._rules.include_stop else end - matcher.stop_length]
        return whole[: len(whole) - len(matcher.held)]

    def _finish(self) -> str:
        """Return all text that was held back: an incomplete character, text that the output parser holds, and the
        beginning of a possible stop string. A stop string that the last characters complete still matches (but not
        within `min_tokens`), and cuts the text before it, or behind it if the rules include stop strings."""
        text = self._decoder.flush()
        self._seen += len(text)
        if self._matcher is None:
            return text
        text = self._release(text) if text else ""
        return text + self._matcher.take_held()

    def _hides(self, token_id: int) -> bool:
        return token_id in self._rules.hidden_ids and not self._rules.include_stop

    def _take_backlog(self, text: str) -> str:
        backlog, self._backlog = self._backlog, []
        return "".join((*backlog, text))
