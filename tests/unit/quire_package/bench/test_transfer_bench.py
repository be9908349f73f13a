"""What the transfer benchmark makes of its seconds: rates by arm, and shares of the floor round by round."""

from __future__ import annotations

from bench.disaggregation.transfer import report


def test_shares_are_of_the_same_round() -> None:
    found = report({"memcpy": [1.0, 4.0, 1.0], "raw_tcp": [1.0, 1.0, 1.0], "tcp": [2.0, 1.25, 1.0]}, 8_000_000)
    assert found["mb_s"] == {"memcpy": 8, "raw_tcp": 8, "tcp": 6}
    assert found["share"] == {"tcp": {"of": "raw_tcp", "share": 0.8, "least": 0.5, "most": 1.0}}


def test_copies_of_engines_are_measured_against_the_same_floor() -> None:
    found = report({"memcpy": [1.0], "raw_tcp": [2.0], "shm": [2.0], "shm_whole": [4.0], "tcp_whole": [4.0]}, 1)
    assert {name: share["share"] for name, share in found["share"].items()} == {
        "shm": 0.5,
        "shm_whole": 0.25,
        "tcp_whole": 0.5,
    }
