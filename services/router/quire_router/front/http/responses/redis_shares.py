"""How many bytes of responses Redis has of a tenant whose share is limited. The tenant's oldest go when it is full.

    quire:responses:TENANT:ends     response id -> its expiry in ms (a sorted set)
    quire:responses:TENANT:bytes    response id -> its bytes; the field '' has their sum

Both expire after the last response. A response that is gone already counts until its room is needed. Redis may evict
one of the two alone: the tenant's account begins anew then, and responses that it no longer counts stay until they
expire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis

_FORGET = """
local function forget(id)
  local had = redis.call('HGET', KEYS[3], id)
  if had then
    redis.call('HINCRBY', KEYS[3], '', -had)
    redis.call('HDEL', KEYS[3], id)
  end
  redis.call('ZREM', KEYS[2], id)
end
"""
# KEYS: the response, the two above. ARGV: its id, its value, its lifetime in ms, the share in bytes, 1 to replace one.
_PUT = (
    _FORGET
    + """
if ARGV[5] == '0' and redis.call('EXISTS', KEYS[1]) == 1 then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
forget(ARGV[1])
local room, gone = tonumber(ARGV[4]) - #ARGV[2], {}
while tonumber(redis.call('HGET', KEYS[3], '') or 0) > room do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then
    redis.call('DEL', KEYS[3])
    break
  end
  gone[#gone + 1] = oldest
  forget(oldest)
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2])
redis.call('HINCRBY', KEYS[3], '', #ARGV[2])
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
end
return gone
"""
)
_DELETE = _FORGET + "forget(ARGV[1]) return redis.call('DEL', KEYS[1])"


class RedisShares:
    """Calls raise RedisError or OSError where Redis does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._put = redis.register_script(_PUT)
        self._delete = redis.register_script(_DELETE)

    async def put(
        self, tenant: str, response_id: str, value: bytes, *, ttl_ms: int, share_bytes: int, replace: bool
    ) -> int:
        """Keep a value that fits into the share, and remove others of the tenant until it fits beside them: first those
        whose time is over, then the oldest. Returns how many were removed before their time."""
        gone = await self._put(
            keys=_keys(tenant, response_id), args=[response_id, value, ttl_ms, share_bytes, int(replace)]
        )
        if not gone:
            return 0
        removed: int = await self._redis.unlink(*(response_key(tenant, found.decode()) for found in gone))
        return removed

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a value; returns whether there was one."""
        return bool(await self._delete(keys=_keys(tenant, response_id), args=[response_id]))


def response_key(tenant: str, response_id: str) -> str:
    """Return the name of a response in Redis."""
    return f"quire:response:{tenant}:{response_id}"


def _keys(tenant: str, response_id: str) -> list[str]:
    return [response_key(tenant, response_id), *(f"quire:responses:{tenant}:{what}" for what in ("ends", "bytes"))]
