"""Names of a sequence's full pages: a chain of hashes over its tokens. The chain is salted if the tenant's pages may
not be shared with other tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.pages import chain_hashes
from quire_common.sequence import page_extras

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request


def identify(request: Request, page_size: int) -> None:
    """Extend the request's page hashes to all of its full pages. No token is hashed twice."""
    hashes = request.hashes
    first, end = len(hashes) * page_size, request.known_len // page_size * page_size
    if first < end:
        extras = page_extras(request.sequence)
        parent = hashes[-1] if hashes else b""
        hashes += chain_hashes(request.ids(first, end), page_size, extras, parent, first)


def most_hits(request: Request, page_size: int) -> int:
    """Return the most pages of the request that need not be computed, among those whose hashes are known. The last
    token is always computed."""
    return min((request.known_len - 1) // page_size, len(request.hashes))
