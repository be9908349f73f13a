"""Frames of page events. Several changes are joined into one frame, so that a busy instance costs its watchers little.

Changes are joined in order, as long as no page is both stored and removed among them. Then their order within the frame
does not matter. This module does not know the instances that hold pages, or the watchers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Hashes in one frame: about 140 KiB, and four times as much with token ids of 64-token pages.
FRAME_PAGES = 4096

_Page = tuple[bytes, int, bytes]


def joined(changes: Iterable[pb.PageEvents], most_pages: int = FRAME_PAGES) -> Iterator[pb.PageEvents]:
    """Join consecutive changes of one epoch, whose sequence numbers begin at 1, into frames of at most `most_pages`
    pages; a larger change stays whole. A new frame also begins where a page would be both stored and removed in one
    frame."""
    frame, pages, stored, removed = pb.PageEvents(), 0, set[_Page](), set[_Page]()
    for change in changes:
        new_stored, new_removed, more = set(_stored(change)), set(_removed(change)), count_pages(change)
        clash = not (stored.isdisjoint(new_removed) and removed.isdisjoint(new_stored))
        if frame.sequence and (clash or pages + more > most_pages):
            yield frame
            frame, pages, stored, removed = pb.PageEvents(), 0, set(), set()
        if frame.sequence:
            _add(frame, change)
        else:
            frame.CopyFrom(change)
        pages += more
        stored |= new_stored
        removed |= new_removed
    if frame.sequence:
        yield frame


def count_pages(frame: pb.PageEvents) -> int:
    """Return the number of pages that a frame stores or removes."""
    stored = sum(len(chain.hashes) for chain in frame.stored)
    return stored + len(frame.removed) + sum(len(gone.hashes) for gone in frame.removed_pages)


def _add(frame: pb.PageEvents, change: pb.PageEvents) -> None:
    """Append a change to the frame, which then covers the sequence numbers up to the change's. A chain whose parent is
    the last page of the frame's last chain, of the same namespace, group and medium, extends that chain. Epoch and age
    stay those of the frame's first change."""
    frame.first_sequence = frame.first_sequence or frame.sequence
    frame.sequence = change.sequence
    for chain in change.stored:
        last: pb.StoredPages | None = frame.stored[-1] if frame.stored else None
        if last is not None and chain.parent and chain.parent == last.hashes[-1] and _pool(chain) == _pool(last):
            last.hashes.extend(chain.hashes)
            last.token_ids += chain.token_ids
        else:
            frame.stored.append(chain)
    frame.removed.extend(change.removed)
    frame.removed_pages.extend(change.removed_pages)


def _pool(chain: pb.StoredPages) -> tuple[bytes, int, str]:
    return chain.namespace, chain.group, chain.medium


def _stored(change: pb.PageEvents) -> Iterator[_Page]:
    """Yield each page that the change stores, as namespace, group and hash, and once more by its hash alone, to be
    compared with removals by hash."""
    # Whoever removes by hash alone has one namespace and one group.
    for chain in change.stored:
        for digest in chain.hashes:
            yield chain.namespace, chain.group, digest
            yield b"", 0, digest


def _removed(change: pb.PageEvents) -> Iterator[_Page]:
    """Yield each page that the change removes, as namespace, group and hash. For a removal by hash alone, namespace and
    group are empty and 0."""
    for digest in change.removed:
        yield b"", 0, digest
    for gone in change.removed_pages:
        for digest in gone.hashes:
            yield gone.namespace, gone.group, digest
