"""Rate limits: buckets by the clock, the same in memory and in Redis, shared by routers, local where Redis is away."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_router.limits.bucket import Levels, TenantBuckets
from quire_router.limits.rate_limits import RateLimited, RateLimits, limit_headers
from quire_router.limits.shared_buckets import SharedBuckets
from quire_router.principal import KeyLimits, Principal
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


def principal(requests: int = 0, tokens: int = 0, tenant: str = "t") -> Principal:
    return Principal(tenant, limits=KeyLimits(requests, tokens))


def test_a_bucket_fills_evenly_and_may_be_in_debt() -> None:
    buckets = TenantBuckets(KeyLimits(60, 600), 0.0)
    assert [buckets.admit(0.0) for _ in range(61)] == [True] * 60 + [False]
    assert not buckets.admit(0.9) and buckets.admit(1.0) and not buckets.admit(1.5)
    buckets.charge(650, 1.5)
    assert buckets.levels(1.5) == Levels(0.5, -50.0)
    assert not buckets.admit(6.0) and buckets.levels(6.5).tokens == pytest.approx(0) and buckets.admit(6.7)
    assert buckets.levels(1000.0) == Levels(60, 600)
    buckets.charge(5, 999.0)  # a clock that went back
    assert buckets.levels(1000.0).tokens == 595


def test_a_clock_that_went_back_fills_a_bucket_only_once() -> None:
    buckets = TenantBuckets(KeyLimits(60, 600), 0.0)
    buckets.charge(600, 0.0)
    assert buckets.levels(10.0).tokens == 100
    buckets.resize(KeyLimits(60, 1200), 4.0)
    assert buckets.levels(10.0).tokens == 100
    buckets.set(Levels(0, 50), 4.0)
    assert buckets.levels(10.0) == Levels(0, 50)


def test_tokens_that_are_given_back_fill_no_bucket_beyond_its_size() -> None:
    buckets = TenantBuckets(KeyLimits(60, 600), 0.0)
    buckets.charge(500, 0.0)
    buckets.charge(-200, 0.0)
    assert buckets.levels(0.0).tokens == 300
    buckets.charge(-400, 0.0)
    assert buckets.levels(0.0).tokens == 600


@given(st.lists(st.floats(0, 30), max_size=200), st.integers(1, 100))
def test_no_window_admits_more_than_its_share(gaps: list[float], per_minute: int) -> None:
    buckets, now, admitted = TenantBuckets(KeyLimits(per_minute), 0.0), 0.0, list[float]()
    for gap in gaps:
        now += gap
        if buckets.admit(now):
            admitted.append(now)
    for first, began in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= per_minute * (1 + (admitted[last] - began) / 60) + 1e-6


async def test_no_limit_costs_nothing() -> None:
    limits = RateLimits()
    assert (await limits.admit(principal())).requests == float("inf")
    limits.charge("t", 1000)
    limits.charge("unknown", 1000)
    assert (await limits.admit(principal())).tokens == float("inf")


async def test_refusals_say_when_to_come_back() -> None:
    limits, who = RateLimits(), principal(requests=2, tokens=60)
    assert (await limits.admit(who)).requests == pytest.approx(1, abs=0.01)
    await limits.admit(who)
    with pytest.raises(RateLimited, match="2 requests per minute") as caught:
        await limits.admit(who)
    assert 20 < caught.value.retry_after_s <= 30
    other = principal(tokens=60, tenant="other")
    await limits.admit(other)
    limits.charge("other", 90)
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught:
        await limits.admit(other)
    assert 20 < caught.value.retry_after_s <= 31
    headers = dict(limit_headers(other.limits, caught.value.levels))
    assert headers[b"x-ratelimit-limit-tokens"] == b"60" and headers[b"x-ratelimit-remaining-tokens"] == b"0"
    assert 80 < float(headers[b"x-ratelimit-reset-tokens"].removesuffix(b"s")) <= 90.1 and len(headers) == 3


async def test_a_bucket_that_fills_while_it_is_asked_refuses_by_the_limit_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two readings of the clock divided by a limit of tokens that the key does not have."""
    limits, who, now_s = RateLimits(), principal(requests=600), time.monotonic()
    monkeypatch.setattr("quire_router.limits.rate_limits.time.monotonic", lambda: now_s)
    for _ in range(600):
        await limits.admit(who)
    readings = itertools.count(now_s + 0.0999, 0.0002)
    monkeypatch.setattr("quire_router.limits.rate_limits.time.monotonic", lambda: next(readings))
    with pytest.raises(RateLimited, match="600 requests per minute"):
        await limits.admit(who)


async def test_a_level_that_redis_rounds_up_refuses_by_the_limit_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedBuckets("redis://127.0.0.1:1")

    async def refuse(*_: object) -> tuple[bool, Levels]:
        return False, Levels(1.0, float("inf"))

    monkeypatch.setattr(shared, "admit", refuse)
    with pytest.raises(RateLimited, match="600 requests per minute"):
        await RateLimits(shared).admit(principal(requests=600))


@pytest.mark.parametrize("before", [principal(requests=2), principal(requests=6000, tokens=6000), principal()])
async def test_changed_limits_of_a_key_hold_from_its_next_request(before: Principal) -> None:
    limits, after = RateLimits(), principal(requests=3, tokens=60)
    for _ in range(2):
        await limits.admit(before)
    with pytest.raises(RateLimited, match="3 requests per minute"):
        for _ in range(4):
            assert (await limits.admit(after)).tokens <= 60
    limits.charge(after.tenant, 90)
    with pytest.raises(RateLimited, match="60 tokens per minute"):
        await limits.admit(principal(tokens=60))


async def test_a_key_that_had_no_limit_for_a_while_owes_nothing_of_this_time() -> None:
    limits, limited = RateLimits(), principal(tokens=60)
    await limits.admit(limited)
    limits.charge(limited.tenant, 90)
    await limits.admit(principal())
    limits.charge(limited.tenant, 1_000_000)
    assert (await limits.admit(limited)).tokens == 60


async def test_a_charge_after_a_change_of_limits_reaches_redis(redis_server: RedisServer) -> None:
    limits = RateLimits(SharedBuckets(redis_server.url))
    await limits.admit(principal(requests=600))
    await limits.admit(principal(tokens=60))
    limits.charge("t", 90)
    await limits.close()
    other = RateLimits(SharedBuckets(redis_server.url))
    with pytest.raises(RateLimited, match="60 tokens per minute"):
        await other.admit(principal(tokens=60))
    await other.close()


async def hammer(limits: RateLimits, who: Principal, until_s: float, tokens: int = 0) -> tuple[int, int]:
    """How many were admitted, and refused."""
    admitted = refusals = 0
    while time.monotonic() < until_s:
        try:
            await limits.admit(who)
        except RateLimited as refused:
            refusals += 1
            await asyncio.sleep(min(refused.retry_after_s / 2, 0.02))
        else:
            admitted += 1
            limits.charge(who.tenant, tokens)
    return admitted, refusals


@pytest.mark.parametrize(("requests", "tokens", "each"), [(6000, 0, 0), (0, 60_000, 10)])
async def test_routers_that_share_a_redis_share_the_limit(
    redis_server: RedisServer, requests: int, tokens: int, each: int
) -> None:
    """Within 1 %, while two routers ask for far more: what was taken and what is left is what flowed in, since some
    moment of the first call until some moment of the last one."""
    who, seconds = principal(requests, tokens), 4.0
    routers = [RateLimits(SharedBuckets(redis_server.url)) for _ in range(2)]
    shared = SharedBuckets(redis_server.url)
    # The bucket of tokens is emptied first, so that what is measured is the flow: nothing flows into a full one.
    earliest = time.monotonic()
    await shared.charge(who.tenant, who.limits, Levels(requests - 1, tokens), tokens, 1)
    began = time.monotonic()
    hammers = (hammer(router, who, began + seconds, each) for router in routers for _ in range(4))
    outcomes = await asyncio.gather(*hammers)
    await asyncio.gather(*(router.close() for router in routers))  # what they owe is told
    ended = time.monotonic()
    _, levels = await shared.admit(who.tenant, who.limits, Levels(0, 0))
    latest = time.monotonic()
    await shared.close()
    counts, refusals = [admitted for admitted, _ in outcomes], sum(refused for _, refused in outcomes)
    left = levels.requests if requests else levels.tokens / each
    taken, full = sum(counts), 5999 if requests else 0
    least, allowed = 100 * (ended - began) + full, 100 * (latest - earliest) + full
    assert least * 0.99 - 5 <= taken + left <= allowed * 1.01 + 5
    # Each of 8 askers may be two ahead: one whose charge is on its way to Redis, and the next.
    assert taken <= allowed * 1.01 + 16
    # Nobody is refused before nearly all is taken: on a slow machine nobody may be.
    assert taken >= least * 0.8 or not refusals
    assert min(sum(counts[:4]), sum(counts[4:])) > 0


async def test_memory_and_redis_count_alike(redis_server: RedisServer) -> None:
    shared, limits = SharedBuckets(redis_server.url), KeyLimits(120, 50)
    full = Levels(120, 50)
    admitted, levels = await shared.admit("t", limits, full)
    assert admitted and levels.requests == pytest.approx(119, abs=0.1) and levels.tokens == 50
    # A token flows in each 1.2 s.
    assert -30.1 < (await shared.charge("t", limits, full, 80, 1)).tokens < -20
    assert -30.1 < (await shared.charge("t", limits, full, 80, 1)).tokens < -10  # the same, sent again
    admitted, levels = await shared.admit("t", limits, full)
    assert not admitted and 118.9 <= levels.requests <= 120
    # Given back, to a full bucket at most.
    assert (await shared.charge("t", limits, full, -40, 2)).tokens > -2
    assert (await shared.charge("t", limits, full, -80, 3)).tokens == 50
    # Of a tenant that Redis has forgotten, the router knows.
    admitted, levels = await shared.admit("forgotten", limits, Levels(0.5, 50))
    assert not admitted and levels.requests == pytest.approx(0.5, abs=0.1)
    assert (await shared.admit("no-tokens", KeyLimits(5), Levels(5, float("inf"))))[1].tokens == float("inf")
    await shared.close()


async def test_a_redis_that_stops_leaves_local_limits_that_go_on_from_there(redis_server: RedisServer) -> None:
    who = principal(requests=60)
    limits = RateLimits(SharedBuckets(redis_server.url))
    began = time.monotonic()
    for _ in range(50):
        await limits.admit(who)
    redis_server.stop()
    admitted = 0
    with pytest.raises(RateLimited):
        while True:
            await limits.admit(who)
            admitted += 1
    ended = time.monotonic()
    assert 10 <= admitted <= 12 + (ended - began)  # one for each second that this took
    redis_server.start()  # with an empty memory: what the router knows is the truth
    await asyncio.sleep(1.1)
    admitted = 0
    with pytest.raises(RateLimited):
        while True:
            await limits.admit(who)
            admitted += 1
    assert admitted <= 2 + (time.monotonic() - ended)
    await limits.close()


async def test_a_frozen_redis_delays_one_request_a_second(redis_server: RedisServer) -> None:
    who, limits = principal(requests=6000, tokens=100), RateLimits(SharedBuckets(redis_server.url))
    await limits.admit(who)
    redis_server.freeze()
    began = time.monotonic()
    for _ in range(200):
        await limits.admit(who)
    assert time.monotonic() - began < 20
    limits.charge(who.tenant, 101)
    with pytest.raises(RateLimited, match="tokens"):
        await limits.admit(who)
    redis_server.thaw()
    await limits.close()


async def test_what_a_frozen_redis_did_not_take_is_charged_once(redis_server: RedisServer) -> None:
    who = principal(tokens=600)
    one, other = (RateLimits(SharedBuckets(redis_server.url)) for _ in range(2))
    began = time.monotonic()
    await one.admit(who)
    redis_server.freeze()
    for _ in range(3):
        one.charge(who.tenant, 100)
        await asyncio.sleep(0.3)
    left = (await one.admit(who)).tokens
    assert 299 < left <= 301 + 10 * (time.monotonic() - began)  # 10 flow in each second
    redis_server.thaw()
    began, left = time.monotonic(), 0.0
    while time.monotonic() < began + 30:
        left = (await other.admit(who)).tokens
        if left < 400:
            break
        await asyncio.sleep(0.05)
    assert 290 < left < 400
    await asyncio.sleep(1.5)  # were it sent once more, it would have been by now
    assert (await other.admit(who)).tokens > left
    await asyncio.gather(one.close(), other.close())
