"""KvstoreClient: the control calls that a scheduler makes to the kvstore: lookups with leases, and releases. Every
failure counts as a miss."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.errors import as_quire_error
from quire_common.identity.callers import KVSTORE
from quire_common.sequence import context_to_pb
from quire_common.telemetry import tracing
from quire_common.telemetry.logs import get_logger
from quire_scheduler.kv.kv_traffic import LookupResult
from quire_scheduler.service.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit import WorkerHello
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.kv.kv_traffic import Lookup

log = get_logger(__name__)
_RELEASE_TIMEOUT_S = 5.0
# A lookup may take this share of the time that computing all its pages would take. Answers that have come by then are
# used. So a kvstore that is slower than the model costs a prompt at most half of its time, and a quick one is waited
# for.
_PATIENCE = 0.5
# The bounds of that time, and the time that is used until prefill has been measured.
_LEAST_S, _UNMEASURED_S, _MOST_S = 0.03, 0.05, 1.0
# A load may begin within this share of its lease's time.
_USABLE = 0.8


class KvstoreClient:
    """One channel to the kvstore."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._channel = aio_channel(config.kvstore, config, KVSTORE)
        self._stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._fixed_s = config.kvstore_timeout_ms / 1000
        self._lease_ms = config.kvstore_lease_ms

    async def look_up(self, lookup: Lookup, hello: WorkerHello) -> LookupResult:
        """Look up and pin the pages in all KV groups at the same time. The result has the number of pages that all
        groups hold, and the time until which a load may begin: 80 % of the shortest lease. Medium and boot id are those
        of the first KV group that answered. It has no pages if a group has none or a call fails or takes too long;
        `failed` says that a call did. Leases that were granted nevertheless are in the result, so that the caller
        releases them."""
        started = time.perf_counter()
        context = context_to_pb(lookup.context)
        with tracing.span("scheduler.kv_lookup", parent=tracing.extract(context)):
            tracing.inject(context)
            groups, patience_s = range(len(hello.num_pages)), self._patience_s(lookup)
            asked = [self._look_up_group(lookup, context, hello, group, patience_s) for group in groups]
            found = await asyncio.gather(*asked)
        us = int((time.perf_counter() - started) * 1e6)
        leases = tuple(answer.lease for answer in found if answer is not None and answer.lease)
        complete = [answer for answer in found if answer is not None and answer.lease]
        said = next((answer for answer in found if answer is not None), kvstore_pb2.LookupAndPinResponse())
        boot_id, watched = said.epoch.boot_id, said.watched
        if len(complete) < len(found):
            return LookupResult(0, leases, us, 0.0, failed=None in found, boot_id=boot_id, watched=watched)
        lease_ms = min(answer.lease_ms or self._lease_ms for answer in complete)
        pages = min(len(lookup.hashes), *(answer.pages for answer in complete))
        # The groups hold the same pages, unless some have been evicted in between.
        expires_s = now_s() + lease_ms / 1000 * _USABLE
        return LookupResult(pages, leases, us, expires_s, complete[0].medium, boot_id=boot_id, watched=watched)

    async def release(self, leases: Sequence[bytes]) -> None:
        """Release leases. A failed call is only logged, since a lease that is not released ends by itself."""
        try:
            await self._stub.Release(kvstore_pb2.ReleaseRequest(leases=leases), timeout=_RELEASE_TIMEOUT_S)
        except grpc.RpcError as error:
            log.warning("leases not released", count=len(leases), code=as_quire_error(error).code)

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()

    def _patience_s(self, lookup: Lookup) -> float:
        """Return how many seconds to wait for the lookup's answer: the configured time or, without one, half of the
        time that computing the pages would take, from 0.03 to 1 s. 0.05 s while that time is not known."""
        if self._fixed_s or lookup.compute_s is None:
            return self._fixed_s or _UNMEASURED_S
        return min(max(_PATIENCE * lookup.compute_s, _LEAST_S), _MOST_S)

    async def _look_up_group(
        self, lookup: Lookup, context: common_pb2.RequestContext, hello: WorkerHello, group: int, patience_s: float
    ) -> kvstore_pb2.LookupAndPinResponse | None:
        """Look up and pin the pages in one KV group; None if the call fails or takes longer than `patience_s`."""
        request = kvstore_pb2.LookupAndPinRequest(
            context=context,
            keys=kvstore_pb2.PageKeys(namespace=hello.model.pages.namespace, group=group, hashes=lookup.hashes),
            lease_ms=self._lease_ms,
        )
        try:
            answer: kvstore_pb2.LookupAndPinResponse = await self._stub.LookupAndPin(request, timeout=patience_s)
        except grpc.RpcError as error:
            log.debug("lookup failed", code=as_quire_error(error).code, request_id=lookup.context.request_id)
            return None
        return answer
