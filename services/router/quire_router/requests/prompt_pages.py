"""Computes the page hashes of a long prompt before the prompt is placed. The work is split over several turns of the
event loop, because hashing a million tokens at once would block the loop for 50 ms."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_common.pages import chain_hashes
from quire_common.sequence import page_extras

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from quire_router.sequences.sequence_state import SequenceState

# The number of tokens that are hashed in one turn of the event loop, in 2 to 4 ms.
TURN_TOKENS = 65_536


async def name_pages(siblings: Sequence_[SequenceState], page_size: int) -> None:
    """Hash the full pages of a long prompt (more than 65,536 tokens), and store the hashes in all siblings. The event
    loop runs other tasks in between. Does nothing for a short prompt, because placement hashes short prompts itself, or
    if `page_size` is 0."""
    spec = siblings[0].spec
    prompt, turn = spec.prompt_ids, TURN_TOKENS // max(page_size, 1) * page_size
    if not turn or len(prompt) <= TURN_TOKENS:
        return
    extras, hashes = page_extras(spec), list[bytes]()
    for at in range(0, len(prompt), turn):
        if at:
            await asyncio.sleep(0)
        hashes += chain_hashes(prompt[at : at + turn], page_size, extras, hashes[-1] if hashes else b"", at)
    for sequence in siblings:
        sequence.placement.name_pages(page_size, hashes)


def forget_pages(siblings: Sequence_[SequenceState]) -> None:
    """Drop the hashes once the siblings are placed: those of a million tokens are megabytes."""
    for sequence in siblings:
        sequence.placement.forget_pages()
