"""Decodes token ids to whole texts, with the library's decoder, and single tokens to bytes. This module knows nothing
of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from quire_common.errors import InvalidArgument, TooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from quire_tokenizer.vocabulary import Vocabulary
    from quire_tokenizer.work_pool import WorkPool

    Ids = NDArray[np.int32]

T = TypeVar("T")
_INLINE_TOKENS = 2048


class WholeDecoder:
    """Decodes whole columns of token ids. Used from one event loop."""

    def __init__(self, vocabulary: Vocabulary, pool: WorkPool, *, max_texts: int, max_token_ids: int) -> None:
        self._vocabulary = vocabulary
        self._pool = pool
        self._max_texts = max_texts
        self._max_token_ids = max_token_ids

    async def decode(self, columns: Sequence[Ids], *, skip_special_tokens: bool) -> list[str]:
        """Decode each column of ids to a text, in a thread if there are more than 2,048 ids. Ids beyond the vocabulary
        add nothing. Raises TooLarge for too many columns, and the errors of `_check_and_run`: too many ids, a negative
        id, or too much waiting work."""
        if len(columns) > self._max_texts:
            message = f"{len(columns)} texts; at most {self._max_texts} are accepted."
            raise TooLarge("TOO_MANY_TEXTS", message, "Send fewer at a time.")

        def work() -> list[str]:
            ids = [column.tolist() for column in columns]
            return self._vocabulary.tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)

        return await self._check_and_run(columns, work)

    async def token_bytes(self, column: Ids) -> list[bytes]:
        """Return the bytes that each token adds to a text that goes on; an id beyond the vocabulary adds none. Raises
        the errors of `_check_and_run`: too many ids, a negative id, or too much waiting work."""

        def work() -> list[bytes]:
            return [self._vocabulary.token_bytes(i) for i in column.tolist()]

        return await self._check_and_run([column], work)

    async def _check_and_run(self, columns: Sequence[Ids], work: Callable[[], T]) -> T:
        """Check the columns, then run `work`, in a thread if there are more than 2,048 ids. Raises TooLarge for too
        many ids, InvalidArgument for negative ids, and Overloaded if too much work waits for threads. Ids beyond the
        vocabulary are accepted."""
        total = sum(map(len, columns))
        if total > self._max_token_ids:
            message = f"{total} token ids; at most {self._max_token_ids} are accepted."
            raise TooLarge("TOO_MANY_TOKEN_IDS", message, "Send fewer at a time.", param="token_ids")
        for column in columns:
            if len(column) and int(column.min()) < 0:
                message = f"{int(column.min())} is not a token id."
                raise InvalidArgument("BAD_TOKEN_ID", message, "Send ids from 0 up.", param="token_ids")
        return work() if total <= _INLINE_TOKENS else await self._pool.run(work)
