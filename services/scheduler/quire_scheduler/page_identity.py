"""Names of a prompt's full pages: a hash chain over its tokens, salted where its tenant does not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.pages import PageExtras, chain_hashes

if TYPE_CHECKING:
    from quire_common.sequence import Sequence


def prompt_hashes(sequence: Sequence, page_size: int) -> tuple[bytes, ...]:
    """One 32-byte hash per full page of the prompt."""
    full = len(sequence.prompt_ids) // page_size
    if not full:
        return ()
    extras = PageExtras(salt=sequence.cache_salt)
    return tuple(chain_hashes(sequence.prompt_ids[: full * page_size], page_size, extras))
