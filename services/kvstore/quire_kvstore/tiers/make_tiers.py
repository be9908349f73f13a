"""Makes the tiers that a configuration asks for, the fastest first. Each backend is one function in the list."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire_kvstore.tiers.disk_backend import DiskBackend
from quire_kvstore.tiers.redis_address import redis_address
from quire_kvstore.tiers.redis_backend import RedisBackend
from quire_kvstore.tiers.tier import WRITE_MODES, Tier, TierSettings

if TYPE_CHECKING:
    from quire_common.kv.page_mac import PageMac
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.tiers.backend import TierBackend


def make_tiers(config: KvstoreConfig, mac: PageMac | None = None) -> tuple[Tier, ...]:
    """Make the configured tiers, disk before Redis, without opening them. Their pages have MACs by `mac`, if it is
    given. Raises ConfigError if the Redis URL is bad or its file cannot be read."""
    made = (make(config, mac) for make in (_disk, _redis))
    return tuple(tier for tier in made if tier is not None)


def _disk(config: KvstoreConfig, mac: PageMac | None) -> Tier | None:
    """Make the disk tier from the configuration; None unless it has a path and room for pages."""
    if not config.disk_path or not config.disk_bytes:
        return None
    backend = DiskBackend(
        Path(config.disk_path),
        config.disk_bytes,
        config.disk_policy,
        config.disk_retry_s,
        config.disk_keep_free_bytes,
    )
    return _tier(config, backend, mac, config.disk_write, config.disk_read_threads, config.disk_write_threads)


def _redis(config: KvstoreConfig, mac: PageMac | None) -> Tier | None:
    """Make the Redis tier from the configuration; None without a URL. Raises ConfigError for a URL that is none of a
    Redis, or a file of the URL that cannot be read."""
    if not config.redis_url:
        return None
    backend = RedisBackend(
        redis_address(config.redis_url, config.redis_url_file),
        config.redis_ttl_s,
        config.redis_timeout_ms / 1000,
        config.redis_retry_s,
        config.max_page_bytes,
    )
    return _tier(config, backend, mac, config.redis_write, config.redis_read_threads, config.redis_write_threads)


def _tier(
    config: KvstoreConfig,
    backend: TierBackend,
    mac: PageMac | None,
    write: str,
    read_threads: int,
    write_threads: int,
) -> Tier:
    """Make a tier of this backend, with the configured queue limits. `write` names one of the WRITE_MODES."""
    settings = TierSettings(WRITE_MODES[write], read_threads, write_threads, config.read_queue, config.write_queue)
    return Tier(backend, settings, mac)
