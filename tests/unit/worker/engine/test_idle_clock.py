"""An engine that was idle for hours, or whose host was: the clock is faked, and each report can still be written."""

from __future__ import annotations

import time

import pytest

from quire_common.credit import decode_report, encode_report
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import EngineBench, a_start

HOUR_NS = 3_600 * 10**9
PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("hours", [1, 1.3, 80, 24 * 365])
def test_the_first_step_after_hours_without_work_is_reported(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=4))
    bench.run()
    real = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + int(hours * HOUR_NS))
    bench.grant(a_start(1, PROMPT, [5, 6, 7, 8], max_tokens=4))
    told = bench.run()
    assert told.tokens[1] == continuation(PROMPT, 4, 97, 0)
    for report in told.reports:
        again = decode_report(encode_report(report))
        assert again.steps == report.steps
    waited_us = max(step.wait for report in told.reports for step in report.timing)
    assert waited_us >= hours * HOUR_NS // 1000
