"""Tables of the way of requests through a stack with prefill and decode replicas. One table has a row per request. The
other one has the number of pages that each replica pulled from each other replica. This module only formats the values
that it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.cli.output.terminal import paint, table
from quire.outputs import HopTiming

_HEADER = (
    *("request", "tokens", "prefill at", "decode at", "pages", "bytes", "by"),
    *("prefill ms", "transfer ms", "first token ms", "second after ms"),
)
_RIGHT = (0, 1, 4, 5, 7, 8, 9, 10)
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class PageFlow:
    """The way of one request through the replicas. `prefill` is empty if one replica did both the prefill and the
    decoding. All times are in milliseconds. `first_ms` is the time from the client's request to the first token, and
    `second_ms` the time from the first token to the second."""

    tokens: int
    prefill: str
    decode: str
    pages: int
    page_bytes: int
    transport: str
    prefill_ms: float
    transfer_ms: float
    first_ms: float
    second_ms: float


def flow_table(flows: Sequence[PageFlow]) -> str:
    """Return a table with a row per request, in the order of the requests."""
    rows = [[str(number), *_cells(flow)] for number, flow in enumerate(flows, 1)]
    header, _, body = table(_HEADER, rows, _RIGHT).partition("\n")
    return f"{paint(header, 'dim')}\n{body}"


def flow_matrix(flows: Sequence[PageFlow]) -> str:
    """Return a table of the number of pages that went from each prefill replica (rows) to each decode replica
    (columns). If no request had its prefill on another replica, the text says that no page was moved."""
    moved = Counter[tuple[str, str]]()
    for flow in flows:
        if flow.prefill:
            moved[flow.prefill, flow.decode] += flow.pages
    if not moved:
        return "No page was moved."
    sources, sinks = sorted({one for one, _ in moved}), sorted({other for _, other in moved})
    rows = [[source, *(str(moved[source, sink] or "-") for sink in sinks)] for source in sources]
    return table(["pages from", *(f"to {sink}" for sink in sinks)], rows, range(1, len(sinks) + 1))


def find(timings: Iterable[HopTiming], service: str, phase: str) -> HopTiming | None:
    """Return the timing of that service and phase; None if there is none."""
    return next((timing for timing in timings if (timing.service, timing.phase) == (service, phase)), None)


def spell_bytes(count: int) -> str:
    """Return a number of bytes as text, in GiB, MiB, KiB or B."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _cells(flow: PageFlow) -> list[str]:
    """Return the cells of one request's row, without its number. If one replica did all, the cells about the move are
    empty."""
    times = [f"{flow.first_ms:.0f}", f"{flow.second_ms:.0f}"]
    if not flow.prefill:
        return [str(flow.tokens), "", flow.decode, "", "", "", f"{flow.prefill_ms:.0f}", "", *times]
    moved = [str(flow.pages), spell_bytes(flow.pages * flow.page_bytes), flow.transport]
    return [
        str(flow.tokens),
        flow.prefill,
        flow.decode,
        *moved,
        f"{flow.prefill_ms:.0f}",
        f"{flow.transfer_ms:.1f}",
        *times,
    ]
