"""Rules of the caches, broken one at a time: what a proof that warm equals cold must notice. See `mutations`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire_common.pages import HEADER_BYTES, PageExtras, PageKey, PageRun, chain_hashes
from quire_kvstore import page_store, put_manager
from quire_scheduler.core.replica import Replica
from quire_scheduler.kv import kv_traffic, page_identity, prefix_cache
from quire_scheduler.kv.offload import Offload
from quire_scheduler.kv.page_allocator import PageAllocator
from quire_scheduler.kv.prefix_cache import PrefixCache
from quire_worker.engine.resident_slots import ResidentSlots
from quire_worker.kv_transfer.transports import grpc_transport
from tests.exactness.mutations import UNLUCKY, Mutation
from tests.exactness.virtual.virtual_replica import VirtualReplica
from tests.exactness.warm.hit_rights import HitRights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest import MonkeyPatch

    from quire_scheduler.core.request import Request
    from quire_scheduler.kv.prefix_cache import Hit

ON_DEVICE = {"prefix_cache": True}
# Prefixes are looked for in the kvstore alone.
IN_STORE = {"prefix_cache": False}


def named_by_the_wrong_parent(patch: MonkeyPatch) -> None:
    """A page's name continues that of the first page, not that of the one before it."""

    def orphaned(ids: Any, size: int, extras: PageExtras, parent: bytes, first: int) -> list[bytes]:
        hashes = chain_hashes(ids[:size], size, extras, parent, first)
        for at in range(size, len(ids) - size + 1, size):
            hashes += chain_hashes(ids[at : at + size], size, extras, hashes[0], first + at)
        return hashes

    patch.setattr(page_identity, "chain_hashes", orphaned)


def salt_ignored(patch: MonkeyPatch) -> None:
    """Tenants share their pages. No token tells."""
    patch.setattr(page_identity, "page_extras", lambda sequence: PageExtras())


def the_last_token_cached_too(patch: MonkeyPatch) -> None:
    """Hits are capped at the prompt, not at the one before its last token."""
    for module in (prefix_cache, kv_traffic):
        patch.setattr(module, "most_hits", lambda request, size: len(request.hashes))


def evicted_pages_found(patch: MonkeyPatch) -> None:
    """A page keeps its name when it is made anew."""

    def evicted(self: PageAllocator, count: int) -> list[int]:
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self._kept[pages] = False
        return pages

    patch.setattr(PageAllocator, "_evict", evicted)


def loads_named_when_they_begin(patch: MonkeyPatch) -> None:
    """A page is named before its load has come, whatever comes."""
    begin = PrefixCache.begin

    def begun(self: PrefixCache, request: Request, hit: Hit, loaded: int) -> None:
        begin(self, request, hit, loaded)
        for group, table in enumerate(request.tables if self.enabled else ()):
            self._name(request, group, hit.pages, table[hit.pages : loaded])

    patch.setattr(PrefixCache, "begin", begun)


def failed_loads_named(patch: MonkeyPatch) -> None:
    """All pages of a load are named, also those that did not come."""
    loaded = PrefixCache.loaded

    def whole(self: PrefixCache, request: Request, group: int, first: int, pages: Sequence[int], arrived: int) -> None:
        loaded(self, request, group, first, pages, len(pages))

    patch.setattr(PrefixCache, "loaded", whole)


def pages_stored_before_they_are_full(patch: MonkeyPatch) -> None:
    """Pages are stored when their request has them, and the worker does not look whether they are whole."""
    filled = Offload.store_new_pages

    def early(self: Offload, request: Request, **least: int) -> bool:
        ready = self._cache.ready_pages(request)
        self._cache.restart(request, min(len(request.hashes), len(request.tables[0])))
        try:
            return filled(self, request, **least)
        finally:
            self._cache.restart(request, ready)

    patch.setattr(Offload, "store_new_pages", early)
    patch.setattr(ResidentSlots, "can_store", lambda self, pages: True)


def loads_not_checked(patch: MonkeyPatch) -> None:
    """The worker takes what comes for what it asked for."""

    def believed(framed: bytes, key: PageKey, dtype: str, body_bytes: int, mac: None) -> memoryview:
        return memoryview(bytes(framed[HEADER_BYTES:]).ljust(body_bytes, b"?"))

    patch.setattr(grpc_transport, "check_page", believed)


def keys_without_namespace(patch: MonkeyPatch) -> None:
    """A page of the same tokens is taken, whichever model computed it."""
    _rekey(patch, lambda run: replace(run, namespace=bytes(32)))


def keys_without_group(patch: MonkeyPatch) -> None:
    """A page of the same tokens is taken, of whichever KV group."""
    _rekey(patch, lambda run: replace(run, group=0))


def rot_not_seen_by_the_store(patch: MonkeyPatch) -> None:
    """The kvstore keeps what came, and hands out what it has. This one alone is no rule of exactness: the worker looks
    too."""
    for module in (page_store, put_manager):
        patch.setattr(module, "is_intact", lambda framed, key, checksum=None, mac=None: True)


def unguarded(break_rule: Callable[[MonkeyPatch], None]) -> Callable[[MonkeyPatch], None]:
    """The same where nobody looks whether names and pages agree, and who may find what: the tokens must tell."""

    def both(patch: MonkeyPatch) -> None:
        break_rule(patch)
        patch.setattr(Replica, "check_integrity", lambda self: None)
        patch.setattr(VirtualReplica, "check_named", lambda self: None)
        patch.setattr(VirtualReplica, "_inventory", lambda self: None)
        patch.setattr(HitRights, "granted", lambda self, place, start: None)

    both.__name__ = f"{break_rule.__name__}_unguarded"
    return both


def _rekey(patch: MonkeyPatch, changed: Callable[[PageRun], PageRun]) -> None:
    key = PageRun.key
    patch.setattr(PageRun, "key", lambda self, index: key(changed(self), index))
    patch.setattr(PageRun, "keys", lambda self: tuple(self.key(index) for index in range(len(self))))


CACHE_MUTATIONS = (
    Mutation(named_by_the_wrong_parent, ON_DEVICE),
    Mutation(unguarded(named_by_the_wrong_parent), ON_DEVICE),
    Mutation(salt_ignored, {}),
    Mutation(the_last_token_cached_too, {}),
    Mutation(unguarded(the_last_token_cached_too), {}),
    Mutation(evicted_pages_found, ON_DEVICE),
    Mutation(unguarded(evicted_pages_found), ON_DEVICE),
    Mutation(loads_named_when_they_begin, UNLUCKY, first=8),
    Mutation(failed_loads_named, UNLUCKY, first=8),
    Mutation(pages_stored_before_they_are_full, IN_STORE, first=25),
    Mutation(loads_not_checked, IN_STORE, first=5),
    Mutation(keys_without_namespace, IN_STORE),
    Mutation(keys_without_group, IN_STORE),
)
