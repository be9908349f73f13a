"""Logprobs of a prompt go to who held the slot when its chunk was computed, and to nobody once that one has gone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire_common.credit import LogprobColumns, PromptLogprobs, Report
from quire_common.errors import Internal
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.outputs import SessionOutputs
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence


def scored(slot: int, first: int = 1) -> PromptLogprobs:
    columns = (np.zeros(2, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    return PromptLogprobs(
        slot,
        first,
        LogprobColumns(np.arange(2, dtype=np.int32), np.array([-1, -2], np.float32), np.ones(2, np.int32), *columns),
    )


def first_report(rig: Rig, handle: int, session: int) -> Report:
    rig.submit(handle, a_sequence(5, 3), session=session)
    grant = rig.core.next_grant(rig.now)
    assert grant is not None
    rig.worker.deliver(grant)
    report = rig.worker.step()
    assert report is not None and len(report.slot) == 1
    return report


def told(outputs: list[SessionOutputs]) -> list[tuple[int, int, int, list[float]]]:
    return [
        (out.session, chunk.owner, chunk.first, chunk.logprobs.logprob.tolist())
        for out in outputs
        for chunk in out.prompt_logprobs
    ]


def test_prompt_logprobs_arrive_with_the_first_token() -> None:
    rig = Rig(SchedulerConfig(lockstep=True))
    report = first_report(rig, handle=7, session=2)
    slot = int(report.slot[0])
    report.prompt_logprobs = [scored(slot, 1), scored(slot, 3)]
    outputs = rig.core.on_report(report, rig.now)
    assert told(outputs) == [(2, 7, 1, [-1, -2]), (2, 7, 3, [-1, -2])]
    assert [out.handle.tolist() for out in outputs] == [[7]]


def test_prompt_logprobs_of_an_aborted_request_are_dropped() -> None:
    rig = Rig(SchedulerConfig(lockstep=True))
    report = first_report(rig, handle=7, session=2)
    report.prompt_logprobs = [scored(int(report.slot[0]))]
    assert rig.core.abort(2, 7, rig.now)
    assert told(rig.core.on_report(report, rig.now)) == []


def test_prompt_logprobs_of_an_unknown_slot_are_an_internal_error() -> None:
    rig = Rig(SchedulerConfig(lockstep=True))
    report = first_report(rig, handle=7, session=2)
    report.prompt_logprobs = [scored(10_000)]
    with pytest.raises(Internal):
        rig.core.on_report(report, rig.now)


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    """Whoever sends the request: a scheduler's own clients need not know of `skip_cache_read`."""
    rig = Rig()
    rig.submit(1, a_sequence(20, 3))
    rig.run()
    asking = a_sequence(20, 3)
    rig.submit(2, replace(asking, sampling=replace(asking.sampling, prompt_logprobs=0)))
    before = rig.core.stats.prefill_tokens
    rig.run()
    assert rig.core.stats.prefill_tokens - before == 20
