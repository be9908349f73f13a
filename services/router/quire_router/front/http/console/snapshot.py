"""Makes snapshots: all data of the console at one moment, as JSON of bounded size. Uses only state in the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson

from quire_common.identity.expiry import first_expiry
from quire_common.version import installed_version
from quire_router.front.http.console.problems import problems

if TYPE_CHECKING:
    from quire_router.front.http.console.tier_stats_client import StoreStats
    from quire_router.placement.placement_service import HeldPages
    from quire_router.replicas.fleet import Fleet
    from quire_router.replicas.replica import Replica
    from quire_router.requests.admission import Admission
    from quire_router.requests.live_generations import LiveGenerations, LiveRequest
    from quire_router.text.tokenizer_pool import TokenizerPool

MOST_REQUESTS = 100
MOST_REPLICAS = 200
MOST_PEERS = 100
MOST_TENANTS = 50
MOST_BYTES = 512 * 1024
_MOST_DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True)
class SnapshotSources:
    """Sources of a snapshot. `in_flight_limit` is `--max-concurrent-requests`. `process` is the number of this HTTP
    process, from 0. `with_actions`: whether the console offers actions, which need keys."""

    instance: str
    process: int
    in_flight_limit: int
    fleet: Fleet
    pool: TokenizerPool
    admission: Admission
    live: LiveGenerations
    held_pages: Callable[[], Sequence[HeldPages]]
    stores: Callable[[], Sequence[StoreStats]]
    open_transfers: Callable[[], int]
    tenant_name: Callable[[str], str]
    model_name: Callable[[str], str]
    with_actions: Callable[[], bool]


class Snapshots:
    """Makes snapshots from their sources."""

    def __init__(self, sources: SnapshotSources) -> None:
        self._sources = sources
        self._started_s = time.monotonic()
        self._version = installed_version("quire-router")

    def frame(self) -> bytes:
        """Return a snapshot as JSON. If that is longer than 512 KiB, the lists of requests are emptied; if it is still
        longer, also those of replicas and of page holders. After that, its length is not checked again."""
        snapshot = self.snapshot()
        encoded = orjson.dumps(snapshot)
        if len(encoded) > MOST_BYTES:
            snapshot["requests"]["rows"], snapshot["requests"]["recent"] = [], []
            encoded = orjson.dumps(snapshot)
        if len(encoded) > MOST_BYTES:
            snapshot["replicas"], snapshot["kv"]["holders"] = [], []
            encoded = orjson.dumps(snapshot)
        return encoded

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot as plain values: router, replicas, tokenizers, requests, KV, certificates, and the problems
        that they show. Lists are cut to their limits."""
        sources = self._sources
        replicas = list(sources.fleet.replicas.values())
        snapshot: dict[str, Any] = {
            "time": time.time(),
            "router": self._router(),
            "actions": sources.with_actions(),
            "replicas": [self._replica(replica) for replica in replicas[:MOST_REPLICAS]],
            "replicas_total": len(replicas),
            "tokenizers": [
                {"instance": peer.instance, "phase": "ready" if peer.healthy else "connecting"}
                for peer in list(sources.pool.peers.values())[:MOST_PEERS]
            ],
            "requests": self._requests(),
            "kv": self._kv(),
            "certificates": _certificates(sources.instance, replicas[:MOST_REPLICAS]),
        }
        snapshot["problems"] = [problem._asdict() for problem in problems(snapshot)]
        return snapshot

    def _router(self) -> dict[str, Any]:
        """Return this router process: its version, number and uptime, whether it is paused, and the sequences in flight
        with their limit."""
        sources = self._sources
        return {
            "instance": sources.instance,
            "version": self._version,
            "process": sources.process,
            "uptime_s": time.monotonic() - self._started_s,
            "paused": not sources.admission.open,
            "in_flight": sources.admission.inside,
            "limit": sources.in_flight_limit,
        }

    def _replica(self, replica: Replica) -> dict[str, Any]:
        """Return one replica's identity and state, its last reported load, and the sums of its ended requests (None if
        there are none)."""
        load = replica.load
        sums = self._sources.live.sums.get(replica.instance)
        return {
            "instance": replica.instance,
            "address": replica.address,
            "model": self._sources.model_name(replica.model.name) if replica.model else None,
            "role": replica.role,
            "phase": load.phase,
            "progress": load.progress,
            "detail": load.detail[:_MOST_DETAIL_CHARS],
            "session": replica.session.open,
            "accepts": replica.accepts,
            "version": load.version,
            "in_flight": replica.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "max_num_seqs": load.max_num_seqs,
            "oldest_wait_ms": load.oldest_wait_ms,
            "waiting_prefill_tokens": load.waiting_prefill_tokens,
            "pages": load.pages,
            "free_pages": load.free_pages,
            "referenced_pages": load.referenced_pages,
            "step_ms": load.step_ms,
            "decode_tokens_per_s": load.decode_tokens_per_s,
            "prefill_tokens_per_s": load.prefill_tokens_per_s,
            "open_transfers": load.open_transfers,
            "pull_bytes_per_s": load.pull_bytes_per_s,
            "near_pull_bytes_per_s": load.near_pull_bytes_per_s,
            "restarts": replica.restarts,
            "ended": asdict(sums) if sums is not None else None,
        }

    def _requests(self) -> dict[str, Any]:
        """Return the number of running requests, in all and of the busiest tenants. Also returns the requests that have
        run longest, and those that ended last, the newest first."""
        live, name = self._sources.live, self._sources.tenant_name
        tenants = live.by_tenant().most_common(MOST_TENANTS)
        return {
            "running": len(live),
            "tenants": [{"tenant": name(tenant), "running": count} for tenant, count in tenants],
            "rows": [_request(request, name(request.tenant)) for request in live.oldest(MOST_REQUESTS)],
            "recent": [_request(request, name(request.tenant)) for request in reversed(live.recent)],
        }

    def _kv(self) -> dict[str, Any]:
        """Return how many pages each peer holds, the most first, the statistics of the kvstores, and the number of open
        transfers between replicas."""
        sources = self._sources
        held = sorted(sources.held_pages(), key=lambda one: -one.pages)
        return {
            "holders": [one._asdict() for one in held[: MOST_REPLICAS + MOST_PEERS]],
            "stores": [asdict(store) for store in sources.stores()[:MOST_PEERS]],
            "open_transfers": sources.open_transfers(),
        }


def _certificates(instance: str, replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """Return the seconds until the first certificate of this router and of each scheduler expires, the shortest first.
    Instances without certificates are left out."""
    ends = {instance: first_expiry(), **{one.instance: one.load.certificate_expiry_unix_s for one in replicas}}
    now_s = time.time()
    found = [{"subject": name, "seconds_left": end - now_s} for name, end in ends.items() if end]
    return sorted(found, key=lambda one: one["seconds_left"])


def _request(request: LiveRequest, tenant: str) -> dict[str, Any]:
    """Convert a request to plain values. `tenant`: the name of its tenant."""
    return {**asdict(request), "tenant": tenant, "runs": [run._asdict() for run in request.runs]}
