"""Who may find what: a start counts on no page whose tokens were not asked for before under the same salt, on none for
its last token, and on none at all where it asked to skip the cache. Judges by tokens alone, and trusts no hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_common.credit import Start
    from quire_common.sequence import Sequence
    from tests.exactness.judge import Wanted


class HitRights:
    """Over all lives that share a cache."""

    def __init__(self, page_size: int, wanted: dict[int, Wanted]) -> None:
        self._page_size = page_size
        self._wanted = wanted
        self._said: set[tuple[str, bytes]] = set()

    def granted(self, place: int, start: Start) -> None:
        """The request of that place takes a slot; what is said there may be found from now on."""
        tokens, cached = _known(start.sequence), start.cached_len
        assert cached < len(tokens), f"{cached} of {len(tokens)} positions are taken for cached"
        assert not cached or not start.sequence.skip_cache_read, "the cache was to be skipped"
        for key in self._prefixes(start.sequence, tokens[:cached]):
            assert key in self._said, f"nobody with salt {key[0]!r} has begun with the {cached} tokens that are taken"
        sequence, answer = self._wanted[place]
        whole = np.concatenate([_known(sequence), np.array(answer.tokens, np.int32)])
        self._said.update(self._prefixes(sequence, whole))

    def _prefixes(self, sequence: Sequence, tokens: np.ndarray) -> Iterator[tuple[str, bytes]]:
        """Of whole pages."""
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            yield sequence.cache_salt, tokens[:end].tobytes()


def _known(sequence: Sequence) -> np.ndarray:
    return np.concatenate([sequence.prompt_ids, sequence.output_ids])
