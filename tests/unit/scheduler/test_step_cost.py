"""What a step costs the scheduler: Report decoded and applied, Grant made and encoded, outputs packed.

Printed with `-s`. The bound is loose, for loaded machines: it catches work per token or per page that crept in.
"""

from __future__ import annotations

import time

import numpy as np

from quire.v1 import worker_pb2
from quire_common.credit import Report, decode_report, encode_grant, encode_report
from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.scheduler import Scheduler
from quire_scheduler.session_wire import outputs_to_pb
from tests.fakes.fake_worker import make_hello
from tests.fakes.scheduler_rig import a_sequence

RUNNING, STEPS, MOST_US = 64, 400, 1500.0


def step_us(running: int, steps: int = STEPS) -> dict[str, float]:
    """Median microseconds by part, for decode steps with all slots running and pages of 16."""
    hello = make_hello(max_num_seqs=running, page_size=16, num_pages=running * 40, max_model_len=2048)
    core = Scheduler(SchedulerConfig(lockstep=True), hello)
    now = time.time()
    for handle in range(running):
        core.submit(0, handle, RequestContext("r"), a_sequence(16 + handle % 16, 1000), now)
    grant = core.next_grant(now)
    assert grant is not None and len(grant.start) == running
    slots = np.array([start.slot for start in grant.start], np.int32)
    parts: dict[str, list[float]] = {"decode": [], "on_report": [], "next_grant": [], "encode": [], "outputs": []}
    for step in range(steps):
        message = encode_report(
            Report(
                hello.epoch,
                first_step=step + 1,
                retired=grant.seq,
                step_applied=np.array([grant.seq], np.int64),
                step_rows=np.array([running], np.int32),
                step_prefill_tokens=np.zeros(1, np.int32),
                slot=slots,
                count=np.ones(running, np.int32),
                token=np.full(running, 5, np.int32),
                finish=np.zeros(running, np.uint8),
                running=running,
            )
        ).SerializeToString()
        marks = [time.perf_counter()]
        report = decode_report(worker_pb2.Report.FromString(message))
        marks.append(time.perf_counter())
        outputs = core.on_report(report, now)
        marks.append(time.perf_counter())
        grant = core.next_grant(now)
        marks.append(time.perf_counter())
        assert grant is not None
        encode_grant(grant).SerializeToString()
        marks.append(time.perf_counter())
        for out in outputs:
            outputs_to_pb(out).SerializeToString()
        marks.append(time.perf_counter())
        for name, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append((end - start) * 1e6)
    result = {name: float(np.median(values)) for name, values in parts.items()}
    return result | {"all": sum(result.values())}


def test_a_step_of_64_is_cheap() -> None:
    cost = step_us(RUNNING)
    print("\n", {name: round(us) for name, us in cost.items()})
    assert cost["all"] < MOST_US


def test_cost_grows_less_than_the_batch() -> None:
    small, large = step_us(8, 200), step_us(256, 200)
    print("\n", {n: {name: round(us) for name, us in c.items()} for n, c in ((8, small), (256, large))})
    assert large["all"] < small["all"] * 16
