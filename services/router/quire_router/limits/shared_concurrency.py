"""How many sequences each router has in progress for a tenant, in Redis: one hash per tenant, one lease per router.

    quire:concurrent:{TENANT}   router -> "places:expiry (ms)"      expires with its last lease

The braces are a Redis hash tag. A lease has all places that its router holds, so a call that is lost or repeated does
no harm. The leases of a router that died expire.
"""

from __future__ import annotations

import uuid

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire_common.cancellation import raise_if_cancelled
from quire_common.discovery.redis_client import open_redis

LEASE_S = 10.0
_TIMEOUT_S = 0.25
# KEYS: the hash. ARGV: the router, all places that it is to hold, the limit (0: whatever it is), the lease in ms.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local places, limit, others = tonumber(ARGV[2]), tonumber(ARGV[3]), 0
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local held, expiry = string.match(fields[i + 1], '(%d+):(%d+)')
  if tonumber(expiry) <= now then
    redis.call('HDEL', KEYS[1], fields[i])
  elseif fields[i] ~= ARGV[1] then
    others = others + tonumber(held)
  end
end
if limit > 0 and others + places > limit then return {0, others} end
if places > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d', places, now + tonumber(ARGV[4])))
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return {1, others}
"""


class SharedConcurrency:
    """Calls raise one of `shared_buckets.FAILURES` within a quarter of a second where Redis does not answer."""

    def __init__(self, url: str, url_file: str = "", lease_s: float = LEASE_S) -> None:
        self._redis = open_redis(
            url, url_file, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        self._id = uuid.uuid4().hex[:12]
        self._script = self._redis.register_script(_SCRIPT)
        self.lease_s = lease_s

    async def take(self, tenant: str, places: int, limit: int) -> tuple[bool, int]:
        """Hold `places` in all from now on, if other routers leave room for them below `limit`; else hold what was held
        before. Returns whether there was room, and what others hold."""
        return await self._run(tenant, places, limit)

    async def hold(self, tenant: str, places: int) -> None:
        """Hold `places` in all from now on, whatever others hold."""
        await self._run(tenant, places, 0)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _run(self, tenant: str, places: int, limit: int) -> tuple[bool, int]:
        arguments = [self._id, places, limit, round(self.lease_s * 1000)]
        taken, others = await self._script(keys=[f"quire:concurrent:{{{tenant}}}"], args=arguments)
        raise_if_cancelled()
        return bool(taken), int(others)
