"""What a stack's kvstore tells of its tiers: tests wait there until pages lie where a successor will look for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.local.stack import LocalStack
from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.pipeline.mutual_tls import dial

LIMIT_S = 60.0
# Flags of stacks whose hits are asserted: no lookup is given up because the machine is busy.
PATIENT = {"scheduler": {"kvstore-timeout-ms": "20000"}}
Tiers = dict[str, kvstore_pb2.TierStats]


def wait_for_tiers(stack: LocalStack, condition: Callable[[Tiers], bool]) -> Tiers:
    """Tiers by name, once they are as wanted with no lease and no put open."""
    deadline = time.monotonic() + LIMIT_S
    with dial(stack, "kvstore") as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        while True:
            stats = stub.Stats(kvstore_pb2.StatsRequest(), timeout=LIMIT_S)
            tiers = {tier.medium: tier for tier in stats.tiers}
            if not (stats.leases or stats.pending_puts) and condition(tiers):
                return tiers
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
