"""Stage 7's hand on a worker: one that lives and reports nothing is a failed check, and no check that never ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire_common.credit import Epoch, Report
from quire_common.errors import DeadlineExceeded
from tests.fakes.worker.engine_bench import Told
from tests.gpu import peer_workers


class Heartbeats:
    """A worker's stream in which nothing comes; each frame takes a quarter of a second of `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def next_frame(self) -> Report:
        self.now_s += 0.25
        if self.now_s > 1000:
            raise AssertionError("it is waited for without an end")
        return Report(Epoch(1, 1), heartbeat=True)

    def next_report(self) -> Report:
        while self.next_frame():
            pass
        raise AssertionError


@pytest.mark.parametrize("wanted", ["tokens", "moved"])
def test_a_worker_that_reports_nothing_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    stream = Heartbeats()
    monkeypatch.setattr(peer_workers, "time", SimpleNamespace(monotonic=lambda: stream.now_s))
    side = object.__new__(peer_workers._Side)
    side.scheduler, side.told = stream, Told()  # type: ignore[assignment]  # a stream alone
    with pytest.raises(DeadlineExceeded):
        side.tokens(0, 1) if wanted == "tokens" else side.moved(7)
    assert stream.now_s < 120
