"""PlacementRequest: the facts of a request that placement needs. It stands for a prompt with all of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire_common.pages import chain_hashes
from quire_common.sequence import page_extras
from quire_router.pages.page_keys import page_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequence_

    from quire_common.sequence import Sequence
    from quire_router.pages.page_directory import Prefixes
    from quire_router.pages.page_table import Keys
    from quire_router.placement.replica_table import PagePool


@dataclass(slots=True)
class PlacementRequest:
    """`weight` is the number of sequences of the prompt. `session`: requests of one session should run on one replica;
    '' means no session."""

    sequence: Sequence
    weight: int = 1
    session: str = ""
    prompt_hashes: Mapping[int, list[bytes]] = field(default_factory=dict)
    """By page size, hashes of the prompt's full pages, where they are known already."""
    found: dict[int, Prefixes] = field(default_factory=dict)
    """By pool, what the page directory said: looked up once per decision."""
    _hashes: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the number of known tokens: the prompt, and the output of earlier attempts."""
        return self.sequence.known_len

    def most_hits(self, page_size: int) -> int:
        """Return the greatest number of prompt tokens that a cache may supply: whole pages, never including the last
        token."""
        return (self.tokens - 1) // page_size * page_size

    def chains(self, pool: PagePool) -> Sequence_[Keys]:
        """Return the keys of all full pages of prompt and output, for each group of the pool. Hashes are computed once
        per page size."""
        hashes = self._hashes.get(pool.page_size)
        if hashes is None:
            hashes = self._hashes[pool.page_size] = self._named(self.tokens, pool.page_size)
        return [page_keys(pool.namespace, group, hashes) for group in range(pool.groups)]

    def head(self, pool: PagePool) -> Keys:
        """Return the key of the first page in the first group; an empty array if that page is not full."""
        return page_keys(pool.namespace, 0, self._named(pool.page_size, pool.page_size))

    def _named(self, tokens: int, page_size: int) -> list[bytes]:
        """Return the hashes of the full pages among the first `tokens` tokens of prompt and output. If `prompt_hashes`
        has this page size, the prompt's hashes are taken from there, and not computed."""
        prompt, output = self.sequence.prompt_ids, self.sequence.output_ids
        extras = page_extras(self.sequence)
        known = self.prompt_hashes.get(page_size)
        if known is None:
            hashes = chain_hashes(prompt[:tokens], page_size, extras)
        else:
            hashes = known[: min(tokens, len(prompt)) // page_size]
        if len(output) and tokens > len(prompt):
            at = len(hashes) * page_size
            rest = np.concatenate([prompt[at:], output[: tokens - len(prompt)]])
            hashes += chain_hashes(rest, page_size, extras, hashes[-1] if hashes else b"", at)
        return hashes
