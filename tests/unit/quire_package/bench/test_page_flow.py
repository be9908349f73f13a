"""The tables of how pages went."""

from __future__ import annotations

from quire.cli.output.page_flow import PageFlow, find, flow_matrix, flow_table, spell_bytes
from quire.outputs import HopTiming


def a_flow(prefill: str, decode: str, pages: int = 40) -> PageFlow:
    return PageFlow(640, prefill, decode, pages, 131_072, "tcp", 412.3, 35.04, 420.1, 31.9)


def test_a_row_says_where_a_request_was_and_what_moved() -> None:
    header, row, alone = flow_table([a_flow("prefill-1", "decode-2"), a_flow("", "decode-1")]).splitlines()
    assert row.split() == ["1", "640", "prefill-1", "decode-2", "40", "5.0", "MiB", "tcp", "412", "35.0", "420", "32"]
    assert alone.split() == ["2", "640", "decode-1", "412", "420", "32"]
    # Numbers stand under their names.
    assert header.index("transfer ms") + len("transfer ms") == row.index("35.0") + len("35.0")


def test_the_matrix_counts_pages_between_replicas() -> None:
    flows = [a_flow("prefill-1", "decode-1", 3), a_flow("prefill-2", "decode-2", 5), a_flow("prefill-1", "decode-1", 4)]
    header, *rows = flow_matrix([*flows, a_flow("", "decode-1")]).splitlines()
    assert header.split() == ["pages", "from", "to", "decode-1", "to", "decode-2"]
    assert [row.split() for row in rows] == [["prefill-1", "7", "-"], ["prefill-2", "-", "5"]]
    assert flow_matrix([a_flow("", "decode-1")]) == "No page was moved."


def test_bytes_have_units() -> None:
    assert [spell_bytes(count) for count in (17, 2048, 3 << 20, 5 << 30)] == ["17 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_hops_are_found_by_name() -> None:
    timings = (HopTiming("worker", "prefill", 7, 1), HopTiming("transfer", "pull", 9, 4, "scheduler-decode-1"))
    assert find(timings, "transfer", "pull") is timings[1]
    assert find(timings, "transfer", "push") is None
