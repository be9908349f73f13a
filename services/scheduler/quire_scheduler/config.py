"""The scheduler's flags."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import ServiceConfig, option
from quire_common.telemetry.vllm_names import COMPATIBLE_NAMES
from quire_scheduler.core import roles
from quire_scheduler.core.queue_policy import POLICIES

WRITE_THROUGH, ON_EVICT, SELECTIVE, OFF = OFFLOAD_POLICIES = ("write-through", "on-evict", "selective", "off")
"""When device pages are given to the kvstore; kv/offload.py says what each does."""


@dataclass(frozen=True)
class SchedulerConfig(ServiceConfig):
    """The brain of one engine replica: queue, KV pages and grants for one worker."""

    worker: str = option("", "host:port of this replica's worker")
    scheduling_policy: str = option(
        "fair", "who runs next: by tenants' shares, arrival or priority", choices=tuple(sorted(POLICIES))
    )
    metrics_compat: str = option(
        "none", "metrics that are repeated under another system's names too", choices=COMPATIBLE_NAMES
    )
    max_waiting: int = option(1024, "requests that may wait; more are refused with 429", at_least=1)
    max_queue_wait_s: float = option(
        0.0,
        "longest expected wait for a slot; requests that would wait longer are refused with 429; 0: no bound",
        at_least=0,
    )
    max_num_seqs: int = option(0, "sequences that decode at once; 0: as many as the worker can", at_least=0)
    max_model_len: int = option(
        0, "longest prompt and output together; 0: the model's, as far as pages last", at_least=0
    )
    max_num_batched_tokens: int = option(
        0, "tokens of one step; 0: what a GPU worker has room for, 512 where it is a CPU", at_least=0
    )
    long_prefill_token_threshold: int = option(0, "most tokens of one prompt in a step; 0: no cap", at_least=0)
    max_num_partial_prefills: int = option(1, "prompts that may be partly prefilled at once", at_least=1)
    prefill_tokens_beside_decoders: int = option(0, "prefill tokens of a step that decodes too; 0: no cap", at_least=0)
    enable_prefix_caching: bool = option(True, "keep the KV pages of what was served, for others that begin alike")
    lockstep: bool = option(False, "one Grant, one step, one Report: the plain version of free-running")
    kvstore: str = option("", "host:port of the kvstore; empty: none")
    kvstore_timeout_ms: int = option(
        0, "longest wait for a lookup, later is a miss; 0: half of the time that computing would take", at_least=0
    )
    kvstore_min_tokens: int = option(0, "prompts shorter than this are not looked up or stored", at_least=0)
    kvstore_lease_ms: int = option(30_000, "lease asked for with a lookup", at_least=100, at_most=86_400_000)
    kvstore_known_pages: int = option(262_144, "page hashes remembered as stored already", at_least=0)
    kvstore_offload: str = option(
        WRITE_THROUGH,
        "pages are stored when full, when about to leave the device, when used twice, or not at all",
        choices=OFFLOAD_POLICIES,
    )
    kvstore_moves: int = option(
        64, "stores in flight; further pages are offered again while their request runs", at_least=1
    )
    role: str = option(
        roles.BOTH, "what routers should send here: prefill, decode or whole requests", choices=roles.ROLES
    )
    transfer_lease_s: float = option(
        10.0,
        "how long prefilled pages wait for a decode replica whose router does not renew",
        at_least=0.1,
        at_most=600,
    )
    session_queue: int = option(
        4096, "messages that may wait for a slow router, joined steps as one, before its session is ended", at_least=1
    )
    session_queue_bytes: int = option(
        16 << 20, "bytes that may wait for a slow router before its session is ended", at_least=1 << 16
    )
    page_events_tail: int = option(8192, "page events kept for watchers that resume", at_least=1)
    max_page_watchers: int = option(64, "WatchPages streams at once; more are refused", at_least=1)
    kv_events_config: str = option("", "vLLM's JSON: publish page events by ZeroMQ; empty: do not")
    load_interval_ms: int = option(500, "default time between two load messages", at_least=10)
    # A worker gives a sign of life each 0.25 s, and may be late with it.
    worker_heartbeat_s: float = option(2.0, "longest silence of a worker before it is lost", at_least=0.5)
    worker_timeout_s: float = option(
        120.0, "longest time without progress, though steps were granted, before the worker is hung", at_least=1
    )
