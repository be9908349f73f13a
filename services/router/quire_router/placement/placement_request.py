"""What is to be placed: a prompt and all of its siblings."""

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
    """`weight` sequences of one prompt. `session`: requests of equal sessions belong together; '' is none."""

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
        """Prompt, and output of earlier attempts."""
        return self.sequence.known_len

    def most_hits(self, page_size: int) -> int:
        """Tokens that need no computing at most: the last one always does."""
        return (self.tokens - 1) // page_size * page_size

    def chains(self, pool: PagePool) -> Sequence_[Keys]:
        """Keys of all full pages, by group: the names that a scheduler will give them."""
        hashes = self._hashes.get(pool.page_size)
        if hashes is None:
            hashes = self._hashes[pool.page_size] = self._named(self.tokens, pool.page_size)
        return [page_keys(pool.namespace, group, hashes) for group in range(pool.groups)]

    def head(self, pool: PagePool) -> Keys:
        """The key of the first page alone, in the first group; none where it is not full."""
        return page_keys(pool.namespace, 0, self._named(pool.page_size, pool.page_size))

    def _named(self, tokens: int, page_size: int) -> list[bytes]:
        """Hashes of the full pages of the first so many tokens."""
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
