"""Keeps a tenant's stored responses in Redis within its quota: a full quota loses its oldest responses.

    quire:responses:TENANT:ends     response id -> its expiry in ms (a sorted set)
    quire:responses:TENANT:bytes    response id -> its bytes; the field '' has their sum

Both keys expire after the last response. An expired response counts until its room is needed. If Redis evicts one of
the two keys, the quota starts again from zero; responses that it no longer counts stay until they expire.
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
# KEYS: the response, and the two keys above. ARGV: the response's id, value and lifetime in ms, the quota in bytes, and
# the prefix of the keys of responses. The script itself removes old responses: after the script, another router may
# store a response with the same id again.
_PUT = (
    _FORGET
    + """
local time = redis.call('TIME')
-- With a fraction: of two responses in the same ms, the earlier one is the older.
local now = time[1] * 1000 + time[2] / 1000
forget(ARGV[1])
local room, removed = tonumber(ARGV[4]) - #ARGV[2], 0
while tonumber(redis.call('HGET', KEYS[3], '') or 0) > room do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then
    redis.call('DEL', KEYS[3])
    break
  end
  forget(oldest)
  removed = removed + redis.call('UNLINK', ARGV[5] .. oldest)
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2])
redis.call('HINCRBY', KEYS[3], '', #ARGV[2])
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
end
return removed
"""
)
_DELETE = _FORGET + "forget(ARGV[1]) return redis.call('DEL', KEYS[1])"


class RedisQuotas:
    """The quotas of all tenants. Calls raise RedisError or OSError if Redis does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._put = redis.register_script(_PUT)
        self._delete = redis.register_script(_DELETE)

    async def put(self, tenant: str, response_id: str, value: bytes, *, ttl_ms: int, share_bytes: int) -> int:
        """Store a value that fits into the quota. First remove other values of the tenant until it fits, in the order
        in which they expire. Returns how many of them had not expired. `ttl_ms` is the value's lifetime, and
        `share_bytes` the tenant's quota."""
        removed: int = await self._put(
            keys=_keys(tenant, response_id),
            args=[response_id, value, ttl_ms, share_bytes, response_key(tenant, "")],
        )
        return removed

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value. Returns whether there was one."""
        return bool(await self._delete(keys=_keys(tenant, response_id), args=[response_id]))


def response_key(tenant: str, response_id: str) -> str:
    """Return the name of a response in Redis."""
    return f"quire:response:{tenant}:{response_id}"


def _keys(tenant: str, response_id: str) -> list[str]:
    return [response_key(tenant, response_id), *(f"quire:responses:{tenant}:{what}" for what in ("ends", "bytes"))]
