"""The kvstore's configuration. Every table, list and queue that a peer can grow has its bound here."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import ServiceConfig, option
from quire_common.kv.page_mac import KEY_FILE_HELP, KEY_HELP
from quire_kvstore.eviction import POLICIES
from quire_kvstore.tiers.tier import WRITE_MODES

_POLICY_NAMES, _WRITE_NAMES = tuple(POLICIES), tuple(WRITE_MODES)
_WRITE_HELP = "which pages are written to it: all, those that lookups have found twice, or none"


@dataclass(frozen=True)
class KvstoreConfig(ServiceConfig):
    """Content-addressed KV pages with leases."""

    ram_bytes: int = option(1 << 30, "memory for pages; taken as it is used", at_least=1 << 16)
    ram_populate: bool = option(False, "take that memory at the start, so that no put waits for it later")
    ram_policy: str = option("lru", "which pages leave memory first", choices=_POLICY_NAMES)
    default_lease_ms: int = option(10_000, "life of a lease whose request names none", at_least=1, at_most=86_400_000)
    max_lease_ms: int = option(120_000, "longest life that a request may ask for", at_least=1, at_most=86_400_000)
    max_leases: int = option(4096, "leases at once; more are refused", at_least=1)
    max_keys: int = option(8192, "pages that one call may name; a scheduler names up to 8192", at_least=8192)
    max_page_bytes: int = option(256 << 20, "body of one page", at_least=1)
    max_pending_bytes: int = option(
        256 << 20,
        "memory for pages that are being stored; beyond it, a page is refused unless it is the only one",
        at_least=1,
    )
    max_transfers: int = option(12, "Put and Get streams at once; more are refused", at_least=1)
    transfer_timeout_s: float = option(60.0, "longest life of a Put or Get stream", at_least=0.01)
    data_port: int = option(
        0,
        "TCP port for pages beside gRPC, on the host of --listen; 0 picks a free one, -1: none",
        at_least=-1,
        at_most=65535,
    )
    share_memory: bool = option(True, "processes of this host may read pages where they lie, and lend theirs")
    max_lent_bytes: int = option(1 << 30, "memory that one of them may lend; more is not taken", at_least=1)
    max_data_connections: int = option(256, "connections for pages beside gRPC; more are refused", at_least=1)
    data_timeout_s: float = option(10.0, "longest that one frame of such a connection may take", at_least=0.01)
    data_idle_s: float = option(
        300.0, "how long such a connection is kept for its next request", at_least=0.01, at_most=86_400
    )
    max_watchers: int = option(32, "Watch streams at once; more are refused", at_least=1)
    watch_queue: int = option(1024, "changes kept for watchers that are slow or resume", at_least=1)
    sweep_s: float = option(0.5, "how often expired leases are looked for when nobody calls", at_least=0.01)

    disk_path: str = option("", "folder of the disk tier, for this process alone; empty: no disk tier")
    disk_bytes: int = option(10 << 30, "room for pages on the disk; 0: no disk tier", at_least=0)
    disk_keep_free_bytes: int = option(0, "room of the disk that is left to others", at_least=0)
    disk_policy: str = option("lru", "which pages leave the disk first", choices=_POLICY_NAMES)
    disk_write: str = option("write-through", f"disk: {_WRITE_HELP}", choices=_WRITE_NAMES)
    disk_read_threads: int = option(4, "reads of the disk at once", at_least=1, at_most=64)
    disk_write_threads: int = option(4, "writes to the disk at once", at_least=1, at_most=64)
    disk_retry_s: float = option(2.0, "how long a disk that refused a write is left alone", at_least=0.01)

    redis_url: str = option("", "redis://host:port/db of the Redis tier; empty: none", secret=True)
    redis_url_file: str = option(
        "", "file with the value of --redis-url, read again for new connections when it changes", file_of="redis_url"
    )
    redis_ttl_s: int = option(
        86_400, "life of a page in Redis since it was last put or read", at_least=1, at_most=10 * 365 * 86_400
    )
    redis_write: str = option("write-through", f"Redis: {_WRITE_HELP}", choices=_WRITE_NAMES)
    redis_read_threads: int = option(2, "pipelines of reads at once", at_least=1, at_most=64)
    redis_write_threads: int = option(2, "pipelines of writes at once", at_least=1, at_most=64)
    redis_timeout_ms: int = option(250, "a Redis slower than this, per answer, is left alone", at_least=1)
    redis_retry_s: float = option(1.0, "how long a Redis that failed is left alone", at_least=0.01)

    page_mac_key: str = option("", KEY_HELP, secret=True)
    page_mac_key_file: str = option("", KEY_FILE_HELP, file_of="page_mac_key")
    prefetch_ms: int = option(
        1000, "longest wait of a lookup for pages below memory, within its own time limit; 0: none", at_least=0
    )
    max_prefetches: int = option(16, "lookups that wait at once; more are answered from memory", at_least=1)
    read_queue: int = option(2048, "pages that wait to be read, per tier; more are misses", at_least=1)
    write_queue: int = option(4096, "pages that wait to be written, per tier; more are dropped", at_least=1)
