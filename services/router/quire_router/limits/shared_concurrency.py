"""Stores in Redis how many sequences each router runs for a tenant. Each tenant has one hash, and each router has one
lease in this hash.

    quire:concurrent:{TENANT}   router -> "places:expiry (ms)"      expires with its last lease

The braces are a Redis hash tag. A lease contains the total of its router's places, so a call that is lost or repeated
does no harm. If a router dies, its leases expire. One place is one sequence.
"""

from __future__ import annotations

import uuid
from itertools import chain
from typing import TYPE_CHECKING

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire_common.cancellation import raise_if_cancelled
from quire_common.discovery.redis_client import open_redis

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_S = 10.0
TIMEOUT_S = 0.25
# KEYS: the hash. ARGV: the router, all places that it holds, and the lease in ms; then for each request that waits, in
# their order, its places and its limit.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local places, others, answer = tonumber(ARGV[2]), 0, {}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local held, expiry = string.match(fields[i + 1], '(%d+):(%d+)')
  if tonumber(expiry) <= now then
    redis.call('HDEL', KEYS[1], fields[i])
  elseif fields[i] ~= ARGV[1] then
    others = others + tonumber(held)
  end
end
answer[1] = others
for i = 4, #ARGV, 2 do
  local more = tonumber(ARGV[i])
  local admitted = others + places + more <= tonumber(ARGV[i + 1])
  if admitted then places = places + more end
  answer[#answer + 1] = admitted and 1 or 0
end
if places > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d', places, now + tonumber(ARGV[3])))
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return answer
"""


class SharedConcurrency:
    """This router's leases in Redis. Calls raise one of `shared_buckets.FAILURES` if Redis does not answer. `timeout_s`
    bounds the wait for a connection and the wait for each answer, not a call as a whole."""

    def __init__(self, url: str, url_file: str = "", lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> None:
        self._redis = open_redis(
            url, url_file, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        self._id = uuid.uuid4().hex[:12]
        self._script = self._redis.register_script(_SCRIPT)
        self.lease_s = lease_s

    async def hold(
        self, tenant: str, places: int, asking: Sequence[tuple[int, int]] = ()
    ) -> tuple[Sequence[bool], int]:
        """Set this router's lease to `places` in all, whatever other routers hold. `asking` has (places, limit) for
        each request that waits. In their order, add the places of each request that has room below its limit to the
        lease. A lease that has 0 places then is deleted, and so are expired leases of other routers.

        Returns for each request whether there was room, and the number of places that other routers hold.
        """
        arguments = [self._id, places, round(self.lease_s * 1000), *chain.from_iterable(asking)]
        others, *admitted = await self._script(keys=[f"quire:concurrent:{{{tenant}}}"], args=arguments)
        raise_if_cancelled()
        return list(map(bool, admitted)), int(others)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
