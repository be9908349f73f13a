"""Names of a sequence's full pages: a hash chain over its tokens, salted where its tenant does not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.pages import chain_hashes
from quire_common.sequence import page_extras

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request


def identify(request: Request, page_size: int) -> None:
    """Extend the hashes of the request's full pages to all of its tokens; no token is hashed twice."""
    hashes = request.hashes
    first, end = len(hashes) * page_size, request.known_len // page_size * page_size
    if first < end:
        extras = page_extras(request.sequence)
        parent = hashes[-1] if hashes else b""
        hashes += chain_hashes(request.ids(first, end), page_size, extras, parent, first)


def most_hits(request: Request, page_size: int) -> int:
    """The most pages of the request that need not be computed: the last token always is."""
    return min((request.known_len - 1) // page_size, len(request.hashes))
