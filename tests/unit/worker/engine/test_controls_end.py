"""Devices keep what sequences asked of their logits, and are told by the controls themselves when nobody needs it."""

from __future__ import annotations

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling
from tests.fakes.worker.engine_bench import EngineBench, a_start


def test_controls_know_when_their_sequence_has_left_its_slot() -> None:
    bench = EngineBench()
    asking = Sampling(controls=LogitControls(presence_penalty=1.0))
    bench.grant(a_start(0, [5], [1, 2], max_tokens=1, sampling=asking), a_start(1, [5], [3, 4], sampling=asking))
    first, second = (bench.engine.residents.table.controls[slot] for slot in (0, 1))
    assert first is not None and second is not None and not first.ended
    bench.engine.launch()
    bench.engine.collect()
    assert first.ended and not second.ended
    bench.grant(stop=(1,))
    assert second.ended
