"""Encodes texts to token ids, within bounds. Long texts are encoded in threads, not in the event loop.

A prompt that is far too long is refused without encoding all of it, where its beginning or its bytes show that. This
module knows nothing of chats or protobuf.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import InvalidArgument, TooLarge
from quire_tokenizer.text_cutter import PIECE_CHARS, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from quire_tokenizer.vocabulary import Vocabulary
    from quire_tokenizer.work_pool import WorkPool

    Ids = NDArray[np.int32]

# Encoding this many characters takes about a millisecond; more goes to a thread.
_INLINE_CHARS = 4096
# If a text has more than twice this many characters per allowed token, its beginning is encoded first, as a probe.
_PROBE_CHARS_PER_TOKEN = 8
# The last tokens of a beginning may differ from those of the whole text, so the probe allows so many more tokens.
_PROBE_SLACK = 64
# A text with which the tokens around a text are found. None of its own tokens is a special token.
_WORD = "a"


class Encoder:
    """Encodes texts with the model's tokenizer. Used from one event loop."""

    def __init__(self, vocabulary: Vocabulary, pool: WorkPool, *, max_texts: int, max_text_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._pool = pool
        self._max_texts = max_texts
        self._max_text_bytes = max_text_bytes

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, allow_special_tokens: bool, max_tokens: int
    ) -> list[Ids]:
        """Encode each text. With `add_special_tokens`, the tokenizer adds its special tokens, such as bos, around the
        text. Without `allow_special_tokens`, no part of the text becomes a special token. Raises PROMPT_TOO_LONG if a
        text has more than `max_tokens` tokens (with the added ones; 0: no limit), and other errors for too many texts,
        too many bytes, invalid Unicode, a special token that cannot be taken as text, a long text without a place to
        cut, or too much waiting work."""
        self._check(texts)

        def plain(some: Sequence[str], *, special: bool = add_special_tokens) -> list[Ids]:
            """Encode texts as they are; with `special`, the tokenizer adds its special tokens around each."""
            if allow_special_tokens:
                encodings = self._vocabulary.tokenizer.encode_batch_fast(some, add_special_tokens=special)
                return [np.asarray(encoding.ids, np.int32) for encoding in encodings]
            return self._vocabulary.guarded.encode_batch(some, add_special_tokens=special)

        def piece(text: str, start: int, end: int) -> Ids:
            """Encode the characters from `start` to `end`, without special tokens around them."""
            return plain([text[start:end]], special=False)[0]

        def framed(ids: Ids) -> Ids:
            """Return the ids with the special tokens that the tokenizer adds around a text, if these are wanted. Finds
            them by encoding a word with and without them."""
            if not add_special_tokens:
                return ids
            around, inner = plain([_WORD])[0].tolist(), plain([_WORD], special=False)[0].tolist()
            before = next(i for i in range(len(around)) if around[i : i + len(inner)] == inner)
            after = around[before + len(inner) :]
            return np.concatenate([np.array(around[:before], np.int32), ids, np.array(after, np.int32)])

        return await self._run(texts, plain, piece, framed, max_tokens)

    async def encode_marked(self, text: str, specials: Sequence[tuple[int, int]], *, max_tokens: int) -> Ids:
        """Encode a text that has special tokens only at the given spans (start and end character), which are in order.
        No special tokens are added around the text. Raises the errors of `encode`."""
        self._check([text])
        starts = [start for start, _end in specials]

        def piece(text: str, start: int, end: int) -> Ids:
            # Keep the spans that lie within the piece.
            first, last = bisect_left(starts, start), bisect_left(starts, end)
            within = [(s - start, e - start) for s, e in specials[first:last] if e <= end]
            return self._vocabulary.guarded.encode_marked(text[start:end], within)

        def marked(some: Sequence[str]) -> list[Ids]:
            return [piece(some[0], 0, len(some[0]))]

        return (await self._run([text], marked, piece, lambda ids: ids, max_tokens))[0]

    async def _run(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str]], list[Ids]],
        piece: Callable[[str, int, int], Ids],
        framed: Callable[[Ids], Ids],
        max_tokens: int,
    ) -> list[Ids]:
        """Encode the texts with `encode`: at most 4,096 characters in the event loop, more in threads. If the tokenizer
        allows cuts, a text of more than 2 * PIECE_CHARS characters is encoded in pieces by `piece`, and `framed` adds
        the special tokens around it. Raises PROMPT_TOO_LONG, if possible before all of a text is encoded."""

        def encode_within_limit(some: Sequence[str]) -> list[Ids]:
            """Encode some of the texts. Raises the error of a text with more than `max_tokens` tokens, if possible
            before it is encoded."""
            if max_tokens:
                for text in some:
                    self._check_bytes(text, max_tokens)
                    self._probe(text, encode, max_tokens)
            ids = encode(some)
            longest = max(map(len, ids), default=0)
            if max_tokens and longest > max_tokens:
                raise prompt_too_long(longest, max_tokens, exact=True)
            return ids

        if sum(map(len, texts)) <= _INLINE_CHARS:
            return encode_within_limit(texts)
        found: list[Ids] = []
        # Texts are encoded in groups, because the library needs some 150 bytes per token, and other requests need the
        # threads, too.
        for group in _groups(texts):
            if self._vocabulary.may_cut and len(group[0]) > 2 * PIECE_CHARS:
                found.append(framed(await self._in_pieces(group[0], piece, max_tokens)))
                if max_tokens and len(found[-1]) > max_tokens:
                    raise prompt_too_long(len(found[-1]), max_tokens, exact=True)
            else:
                found += await self._pool.run(partial(encode_within_limit, group))
        return found

    async def _in_pieces(self, text: str, piece: Callable[[str, int, int], Ids], max_tokens: int) -> Ids:
        """Encode a long text piece by piece, in threads, without special tokens around it. Raises PROMPT_TOO_LONG as
        soon as the pieces so far have too many ids, or before if the text has too many bytes. Raises TEXT_TOO_LARGE for
        a text without places to cut."""
        if max_tokens:
            self._check_bytes(text, max_tokens)
        parts: list[Ids] = []
        count = 0
        for start, end in pieces(text):
            parts.append(await self._pool.run(partial(piece, text, start, end)))
            count += len(parts[-1])
            if max_tokens and count > max_tokens:
                raise prompt_too_long(count, max_tokens, exact=end == len(text))
        return await self._pool.run(lambda: np.concatenate(parts), completes=True)

    def _check_bytes(self, text: str, max_tokens: int) -> None:
        """Raise PROMPT_TOO_LONG if the text has more bytes than `max_tokens` tokens can have. Checks nothing if the
        longest token is not known."""
        per_token = self._vocabulary.max_bytes_per_token
        if per_token and len(text.encode()) > max_tokens * per_token:
            raise prompt_too_long(max_tokens, max_tokens, exact=False)

    @staticmethod
    def _probe(text: str, encode: Callable[[Sequence[str]], list[Ids]], max_tokens: int) -> None:
        """Refuse a very long text early: encode its beginning, of at least 8 characters for each of `max_tokens` + 64
        tokens, and raise PROMPT_TOO_LONG if it has more tokens than these. Does nothing for a text of at most twice
        that length, or if the first space after that length is too far away or does not follow a letter or digit."""
        wanted = (max_tokens + _PROBE_SLACK) * _PROBE_CHARS_PER_TOKEN
        if len(text) <= 2 * wanted:
            return
        cut = text.find(" ", wanted, 2 * wanted)
        if cut > 0 and text[cut - 1].isalnum():
            found = len(encode([text[:cut]])[0])
            if found > max_tokens + _PROBE_SLACK:
                raise prompt_too_long(found - _PROBE_SLACK, max_tokens, exact=False)

    def _check(self, texts: Sequence[str]) -> None:
        """Raise TooLarge for too many texts, or too many UTF-8 bytes of all texts together, and InvalidArgument for
        text that is not valid Unicode."""
        if len(texts) > self._max_texts:
            raise TooLarge(
                "TOO_MANY_TEXTS",
                f"{len(texts)} texts; at most {self._max_texts} are accepted.",
                "Send fewer at a time.",
            )
        try:
            total = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise invalid_unicode() from error
        if total > self._max_text_bytes:
            raise TooLarge(
                "TEXT_TOO_LARGE",
                f"The text has {total} bytes; at most {self._max_text_bytes} are accepted.",
                "Send less text.",
            )


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in order, in groups of at most PIECE_CHARS characters; a longer text is alone in its group."""
    group, chars = list[str](), 0
    for text in texts:
        if group and chars + len(text) > PIECE_CHARS:
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    yield group


def prompt_too_long(tokens: int, max_tokens: int, *, exact: bool) -> InvalidArgument:
    """Return the error of a prompt that does not fit. Without `exact`, the prompt has more than `tokens` tokens."""
    return InvalidArgument(
        "PROMPT_TOO_LONG",
        f"The prompt has {'' if exact else 'more than '}{tokens} tokens; at most {max_tokens} fit.",
        "Shorten the prompt, or ask for fewer output tokens.",
        param="prompt",
    )


def invalid_unicode() -> InvalidArgument:
    """Return the error of text that is not valid Unicode."""
    return InvalidArgument(
        "INVALID_UNICODE", "The text holds half of a surrogate pair.", "Send valid Unicode text.", param="text"
    )
