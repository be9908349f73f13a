"""Token ids to whole texts, as the library has it. Knows nothing of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, TooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from quire_tokenizer.vocabulary import Vocabulary
    from quire_tokenizer.work_pool import WorkPool

_INLINE_TOKENS = 2048


class WholeDecoder:
    """Used from one event loop."""

    def __init__(self, vocabulary: Vocabulary, pool: WorkPool, *, max_texts: int) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._pool = pool
        self._max_texts = max_texts

    async def decode(self, columns: Sequence[NDArray[np.int32]], *, skip_special_tokens: bool) -> list[str]:
        """One text per column. Ids beyond the vocabulary add nothing."""
        if len(columns) > self._max_texts:
            message = f"{len(columns)} texts; at most {self._max_texts} are taken."
            raise TooLarge("TOO_MANY_TEXTS", message, "Send fewer at a time.")
        for column in columns:
            if len(column) and int(column.min()) < 0:
                message = f"{int(column.min())} is no token id."
                raise InvalidArgument("BAD_TOKEN_ID", message, "Send ids from 0 up.", param="token_ids")

        def work() -> list[str]:
            ids = [column.tolist() for column in columns]
            return self._tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)

        if sum(map(len, columns)) <= _INLINE_TOKENS:
            return work()
        return await self._pool.run(work)
