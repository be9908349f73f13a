"""Load: the load of a scheduler, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_common.credit.hello import Epoch


@dataclass(frozen=True, slots=True)
class Load:
    """The last load that WatchLoad reported."""

    phase: str = "connecting"
    progress: float = 0.0
    detail: str = ""
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1
    pages: int = 0
    free_pages: int = 0
    referenced_pages: int = 0
    waiting_prefill_tokens: int = 0
    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    role: str = ""
    """prefill, decode or both; '': it did not say."""
    open_transfers: int = 0
    pull_bytes_per_s: float = 0.0
    near_pull_bytes_per_s: float = 0.0
    epoch: Epoch | None = None
    """Which life of its worker, and which run within it; None: there is no worker, or it is not known."""
    host: bytes = b""
    """Where its worker runs: equal where workers reach each other's memory; empty: nobody knows."""
    kvstore_boot_id: int = 0
    """Its kvstore's life, where that can be watched; 0: none, or not known."""
    step_ms: float = 0.0
    """Mean time of its worker's recent steps; 0: none yet."""
    oldest_wait_ms: int = 0
    """The time that the request at the head has waited, in milliseconds; 0: no request waits."""
    version: str = ""
    """The scheduler's."""
    certificate_expiry_unix_s: int = 0
    """When the first of its certificates ends; 0: it has none."""
