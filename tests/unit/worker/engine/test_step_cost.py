"""Steady decode costs the model thread the same work at any number of rows: no Python object per sequence and step."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from quire_common.credit import encode_report
from tests.fakes.worker.engine_bench import EngineBench, a_start, small_spec
from tests.fakes.worker.held_device import HeldDevice


def calls_of_a_step(rows: int) -> int:
    """Function calls, Python's and C's, of forming, settling, reporting and encoding one step."""
    spec = small_spec(max_num_seqs=rows, max_model_len=64, num_pages=16 * rows + 1, eos_token_ids=(96,))
    bench = EngineBench(spec, depth=2, device=HeldDevice)
    assert isinstance(bench.device, HeldDevice)
    bench.grant(
        *[
            a_start(slot, [slot % 90], list(range(1 + 16 * slot, 17 + 16 * slot)), max_tokens=60, ignore_eos=True)
            for slot in range(rows)
        ]
    )
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()  # what others left ends here, and not among the calls
    for step in range(8):
        if step == 5:
            sys.setprofile(count)
        bench.engine.launch()
        sys.setprofile(None)
        bench.engine.launch()
        bench.device.end()
        if step == 5:
            sys.setprofile(count)
        report = bench.engine.collect()
        assert report is not None
        encode_report(report).SerializeToString()
        sys.setprofile(None)
        assert len(report.token) == rows
    return calls


def test_a_step_of_many_rows_is_as_many_calls_as_one_of_few() -> None:
    calls_of_a_step(4)  # what is made once belongs to neither
    few = calls_of_a_step(4)
    assert 0 < few < 1000
    assert calls_of_a_step(64) == few
