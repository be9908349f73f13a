"""The waterfall of a request: phases are laid out on the request's own time line."""

from __future__ import annotations

from quire_router.requests.waterfall import Hop, unfinished, waterfall
from quire_router.sequences.delta import HopTiming

ROUTER = [
    HopTiming("router", "parse", 1_000),
    HopTiming("router", "tokenize", 4_000),
    HopTiming("router", "place", 2_000),
    HopTiming("tokenizer", "encode", 3_000),
]
ENGINE = [
    HopTiming("router", "total", 100_000),
    HopTiming("tokenizer", "detokenize", 6_000, 30),
    HopTiming("scheduler", "queue", 5_000, 1, "a"),
    HopTiming("worker", "prefill", 10_000, 64, "a"),
    HopTiming("worker", "decode", 75_000, 30, "a"),
]


def bars(hops: list[Hop]) -> dict[tuple[str, str], tuple[float, float]]:
    return {(hop.service, hop.phase): (hop.start_ms, hop.ms) for hop in hops}


def test_phases_follow_on_one_another() -> None:
    found = bars(waterfall([*ROUTER, *ENGINE], first_token_ms=22.0, total_ms=100.0))
    assert found["router", "parse"] == (0.0, 1.0)
    assert found["router", "tokenize"] == (1.0, 4.0)
    assert found["tokenizer", "encode"] == (1.0, 3.0), "within the router's wait for it"
    assert found["router", "place"] == (5.0, 2.0)
    assert found["scheduler", "queue"] == (7.0, 5.0)
    assert found["worker", "prefill"] == (12.0, 10.0)
    assert found["worker", "decode"] == (22.0, 75.0)
    assert ("router", "total") not in found, "the whole is no phase"


def test_bars_are_in_the_order_of_their_begin_and_end_within_the_request() -> None:
    hops = waterfall([*ENGINE, *ROUTER, HopTiming("kvstore", "load", 500_000)], first_token_ms=22.0, total_ms=100.0)
    assert [hop.start_ms for hop in hops] == sorted(hop.start_ms for hop in hops)
    assert all(hop.start_ms + hop.ms <= 100.0 for hop in hops)


def test_request_without_a_token_decodes_after_its_prefill() -> None:
    assert bars(waterfall([*ROUTER, *ENGINE], 0.0, 100.0))["worker", "decode"][0] == 22.0


def test_running_request_shows_its_wait_and_its_decoding_until_now() -> None:
    waiting = bars(unfinished(ROUTER, 0.0, 50.0, "a"))
    assert waiting["scheduler", "to first token"] == (7.0, 43.0) and ("worker", "decode") not in waiting
    decoding = bars(unfinished(ROUTER, 20.0, 50.0, "a"))
    assert decoding["scheduler", "to first token"] == (7.0, 13.0)
    assert decoding["worker", "decode"] == (20.0, 30.0)
