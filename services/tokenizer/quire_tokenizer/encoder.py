"""Text to token ids, within bounds. Long texts are worked on off the event loop.

A prompt that cannot fit is refused without encoding all of it. Knows nothing of chats or protobuf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import InvalidArgument, TooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from quire_tokenizer.vocabulary import Vocabulary
    from quire_tokenizer.work_pool import WorkPool

    Ids = NDArray[np.int32]

# Encoding this many characters takes about a millisecond; more goes to a thread.
_INLINE_CHARS = 4096
# A text with more characters per wanted token than this is first tried on its beginning.
_PROBE_CHARS_PER_TOKEN = 8
# Where the beginning was cut, its last tokens may differ from those of the whole.
_PROBE_SLACK = 64


class Encoder:
    """Used from one event loop."""

    def __init__(self, vocabulary: Vocabulary, pool: WorkPool, *, max_texts: int, max_text_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._pool = pool
        self._max_texts = max_texts
        self._max_text_bytes = max_text_bytes

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, allow_special_tokens: bool, max_tokens: int
    ) -> list[Ids]:
        """The ids of each text. Raises PROMPT_TOO_LONG where one has more than `max_tokens` (0: no limit)."""
        self._check(texts)

        def plain(some: Sequence[str]) -> list[Ids]:
            if allow_special_tokens:
                encodings = self._vocabulary.tokenizer.encode_batch_fast(some, add_special_tokens=add_special_tokens)
                return [np.asarray(encoding.ids, np.int32) for encoding in encodings]
            return self._vocabulary.guarded.encode_batch(some, add_special_tokens=add_special_tokens)

        return await self._run(texts, plain, max_tokens)

    async def encode_marked(self, text: str, specials: Sequence[tuple[int, int]], *, max_tokens: int) -> Ids:
        """The ids of a text whose special tokens are at the given spans and nowhere else."""
        self._check([text])

        def marked(some: Sequence[str]) -> list[Ids]:
            # Of a beginning, the spans that lie within.
            spans = [(start, end) for start, end in specials if end <= len(some[0])]
            return [self._vocabulary.guarded.encode_marked(some[0], spans)]

        return (await self._run([text], marked, max_tokens))[0]

    async def _run(
        self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[Ids]], max_tokens: int
    ) -> list[Ids]:
        def work() -> list[Ids]:
            if max_tokens:
                for text in texts:
                    self._check_bytes(text, max_tokens)
                    self._probe(text, encode, max_tokens)
            ids = encode(texts)
            longest = max(map(len, ids), default=0)
            if max_tokens and longest > max_tokens:
                raise prompt_too_long(longest, max_tokens, exact=True)
            return ids

        if sum(map(len, texts)) <= _INLINE_CHARS:
            return work()
        return await self._pool.run(work)

    def _check_bytes(self, text: str, max_tokens: int) -> None:
        """Where a token stands for so many bytes at most, counting them is enough."""
        per_token = self._vocabulary.max_bytes_per_token
        if per_token and len(text.encode()) > max_tokens * per_token:
            raise prompt_too_long(max_tokens, max_tokens, exact=False)

    @staticmethod
    def _probe(text: str, encode: Callable[[Sequence[str]], list[Ids]], max_tokens: int) -> None:
        """Encode a beginning of 8 characters per allowed token, cut at a space; texts that long rarely fit."""
        wanted = (max_tokens + _PROBE_SLACK) * _PROBE_CHARS_PER_TOKEN
        if len(text) <= 2 * wanted:
            return
        cut = text.find(" ", wanted, 2 * wanted)
        if cut > 0 and text[cut - 1].isalnum():
            found = len(encode([text[:cut]])[0])
            if found > max_tokens + _PROBE_SLACK:
                raise prompt_too_long(found - _PROBE_SLACK, max_tokens, exact=False)

    def _check(self, texts: Sequence[str]) -> None:
        if len(texts) > self._max_texts:
            raise TooLarge(
                "TOO_MANY_TEXTS", f"{len(texts)} texts; at most {self._max_texts} are taken.", "Send fewer at a time."
            )
        try:
            total = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise invalid_unicode() from error
        if total > self._max_text_bytes:
            raise TooLarge(
                "TEXT_TOO_LARGE",
                f"The text has {total} bytes; at most {self._max_text_bytes} are taken.",
                "Send less text.",
            )


def prompt_too_long(tokens: int, max_tokens: int, *, exact: bool) -> InvalidArgument:
    """The error of a prompt that does not fit."""
    return InvalidArgument(
        "PROMPT_TOO_LONG",
        f"The prompt has {'' if exact else 'more than '}{tokens} tokens; at most {max_tokens} fit.",
        "Shorten the prompt, or ask for fewer output tokens.",
        param="prompt",
    )


def invalid_unicode() -> InvalidArgument:
    """The error of text that is no Unicode."""
    return InvalidArgument(
        "INVALID_UNICODE", "The text holds half of a surrogate pair.", "Send valid Unicode text.", param="text"
    )
