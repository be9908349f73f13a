"""Copies many pages from one pool into another in one launch. The source may be the memory of another GPU, mapped by
its address.

With one copy call per page, the link would be idle between two calls. One launch keeps enough loads under way to fill
the link.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pages"])
def gather_pages_kernel(
    source,
    target,
    source_page,
    target_page,
    pages,
    PAGE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid [any number of programs]: copies page source_page[i] of the pool at the address `source`, a multiple of 16
    bytes, to page target_page[i] of `target`, for i < pages. A page is PAGE_WORDS int32."""
    PIECES: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    pool = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    lane = tl.arange(0, BLOCK)
    for piece in range(tl.program_id(0), pages * PIECES, tl.num_programs(0)):
        index = piece // PIECES
        first = (piece % PIECES) * BLOCK
        taken = tl.load(source_page + index).to(tl.int64) * PAGE_WORDS + first
        given = tl.load(target_page + index).to(tl.int64) * PAGE_WORDS + first
        if PAGE_WORDS % BLOCK == 0:
            tl.store(target + given + lane, tl.load(pool + taken + lane))
        else:
            inside = first + lane < PAGE_WORDS
            tl.store(target + given + lane, tl.load(pool + taken + lane, mask=inside), mask=inside)
