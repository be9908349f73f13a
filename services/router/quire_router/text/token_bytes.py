"""A cache of the bytes of single tokens, by token id. The cache has at most one entry per id of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_router.text.tokenizer_client import TokenizerClient

_MAX_ENTRIES = 1_000_000


class TokenBytes:
    """Call `ensure` for ids, then read them with `get` before the next await."""

    def __init__(self, client: TokenizerClient) -> None:
        self._client = client
        self._known: dict[int, bytes] = {}

    async def ensure(self, ids: Iterable[int]) -> None:
        """Fetch the bytes of ids that are not in the cache. If the cache would have more than a million ids, forget all
        ids that are not in `ids`. Raises QuireError if no tokenizer answers, or the tokenizer refuses the ids."""
        wanted = set(ids)
        # Another call may have forgotten ids of this one meanwhile.
        while unknown := sorted(wanted - self._known.keys()):
            fetched = await self._client.token_bytes(unknown)
            if len(self._known) + len(unknown) > _MAX_ENTRIES:
                self._known = {i: self._known[i] for i in wanted & self._known.keys()}
            self._known.update(zip(unknown, fetched, strict=True))

    def get(self, token_id: int) -> bytes:
        """Return the bytes of an id that was ensured."""
        return self._known[token_id]
