"""The kvstore's configuration. Every table, list and queue that a peer can grow has its bound here."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import ServiceConfig, option


@dataclass(frozen=True)
class KvstoreConfig(ServiceConfig):
    """Content-addressed KV pages with leases."""

    ram_bytes: int = option(1 << 30, "memory for pages; taken as it is used", at_least=1 << 16)
    default_lease_ms: int = option(10_000, "life of a lease whose request names none", at_least=1)
    max_lease_ms: int = option(120_000, "longest life that a request may ask for", at_least=1)
    max_leases: int = option(4096, "leases at once; more are refused", at_least=1)
    max_keys: int = option(8192, "pages that one call may name", at_least=1)
    max_page_bytes: int = option(256 << 20, "body of one page", at_least=1)
    max_pending_bytes: int = option(256 << 20, "memory for pages under way; more are not wanted", at_least=1)
    max_transfers: int = option(12, "Put and Get streams at once; more are refused", at_least=1)
    transfer_timeout_s: float = option(60.0, "longest life of a Put or Get stream", at_least=0.01)
    max_watchers: int = option(32, "Watch streams at once; more are refused", at_least=1)
    watch_queue: int = option(1024, "changes that wait for a slow watcher before it gets a new snapshot", at_least=1)
    sweep_s: float = option(0.5, "how often expired leases are looked for when nobody calls", at_least=0.01)
