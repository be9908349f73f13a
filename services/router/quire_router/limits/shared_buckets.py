"""Token buckets in Redis, with one hash per bucket. One script changes them and reads only Redis's clock, so that all
routers see the same levels.

    quire:limit:{tenant}:requests   level, at (ms)      expires once it would be full again
    quire:limit:{tenant}:tokens     level, at (ms)

If Redis does not have a bucket, because it has lost its data, the bucket begins at the level that the calling router
knows.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quire_common.cancellation import raise_if_cancelled
from quire_common.discovery.redis_client import open_redis
from quire_router.limits.bucket import Levels

if TYPE_CHECKING:
    from quire_router.principal import KeyLimits

FAILURES = (RedisError, OSError, TimeoutError)
_TIMEOUT_S = 0.25
# KEYS: the names of both buckets, requests before tokens. ARGV: 1 to take even if the level is too low; then for each
# bucket its size per minute (0: no limit), the least level that admits a request, the amount to take, and the level at
# which a missing bucket begins; last, for a charge, the id of the router and the number of the charge, so that a charge
# that is sent again is taken once.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local force, admitted, levels = ARGV[1] == '1', true, {}
for i, key in ipairs(KEYS) do
  local size, need = tonumber(ARGV[i * 4 - 2]), tonumber(ARGV[i * 4 - 1])
  if size > 0 then
    local state = redis.call('HMGET', key, 'level', 'at')
    local level = tonumber(state[1]) or tonumber(ARGV[i * 4 + 1])
    local passed = math.max(0, now - (tonumber(state[2]) or now))
    levels[i] = math.min(size, level + passed * size / 60000)
    if levels[i] < need then admitted = false end
  end
end
local again = false
if ARGV[10] ~= '' then
  local field = 'n:' .. ARGV[10]
  again = tonumber(redis.call('HGET', KEYS[2], field) or 0) >= tonumber(ARGV[11])
  redis.call('HSET', KEYS[2], field, ARGV[11])
end
local answer = {(admitted or force) and 1 or 0}
for i, key in ipairs(KEYS) do
  local size = tonumber(ARGV[i * 4 - 2])
  if size > 0 then
    if (admitted or force) and not again then levels[i] = math.min(size, levels[i] - tonumber(ARGV[i * 4])) end
    redis.call('HSET', key, 'level', string.format('%.6f', levels[i]), 'at', string.format('%.3f', now))
    redis.call('PEXPIRE', key, math.ceil((size - levels[i]) * 60000 / size) + 60000)
    answer[i + 1] = string.format('%.6f', levels[i])
  else
    answer[i + 1] = 'inf'
  end
end
return answer
"""


class SharedBuckets:
    """The token buckets in Redis. If Redis does not answer, calls raise one of FAILURES; they wait a quarter of a
    second for a connection, and as long for each answer."""

    def __init__(self, url: str, url_file: str = "") -> None:
        self._redis = open_redis(
            url, url_file, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        self._id = uuid.uuid4().hex[:12]
        self._script = self._redis.register_script(_SCRIPT)

    async def admit(self, tenant: str, limits: KeyLimits, known: Levels) -> tuple[bool, Levels]:
        """Take one request in Redis if each limited bucket has at least 1. Returns whether it was taken, and the levels
        after that. A bucket that Redis lacks begins at its level in `known`. Raises one of FAILURES if Redis does not
        answer or refuses."""
        return await self._run(tenant, limits, known, force=False, take=(1, 0))

    async def charge(self, tenant: str, limits: KeyLimits, known: Levels, tokens: int, number: int) -> Levels:
        """Subtract tokens in Redis, and return the levels after that. A level may become negative; a negative `tokens`
        gives tokens back. A charge that is sent again under its `number` is subtracted once; numbers only grow. A
        bucket that Redis lacks begins at its level in `known`. Raises one of FAILURES if Redis does not answer or
        refuses."""
        _, levels = await self._run(tenant, limits, known, force=True, take=(0, tokens), number=number)
        return levels

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _run(
        self, tenant: str, limits: KeyLimits, known: Levels, *, force: bool, take: tuple[int, int], number: int = 0
    ) -> tuple[bool, Levels]:
        """Refill both buckets by Redis's clock, in one script. Then subtract `take` (requests, tokens) if each limited
        bucket has at least 1, or in any case with `force`. Returns whether it was allowed, and the levels after that
        (infinite without a limit).

        A charge that is sent again under the same `number` is taken once; 0 means that there is no number. Buckets that
        Redis lacks begin at `known`.
        """
        keys = [f"quire:limit:{{{tenant}}}:{kind}" for kind in ("requests", "tokens")]
        arguments: list[float | str] = [int(force)]
        sizes = (limits.requests_per_minute, limits.tokens_per_minute)
        for size, cost, level in zip(sizes, take, (known.requests, known.tokens), strict=True):
            arguments += [size, 1, cost, level if size else 0]
        arguments += [self._id if number else "", number]
        admitted, requests, tokens = await self._script(keys=keys, args=arguments)
        raise_if_cancelled()
        return bool(admitted), Levels(float(requests), float(tokens))
