"""A migration that is closed places no sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.errors import Unavailable
from quire_router.config import RouterConfig
from quire_router.kv_transfer.transfers import Transfers
from quire_router.replicas.migration import Migration
from quire_router.replicas.pending_sequences import PendingSequences
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.handles import HandleCounter
from quire_router.sequences.sequence_state import SequenceState
from tests.unit.router.makers import make_job, make_sequence


class FullChooser:
    """Counts how often it is asked; no replica can take a sequence."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, *_: Any, **__: Any) -> None:
        self.asked += 1

    choose_sides = choose


@pytest.mark.parametrize("way", ["start", "start siblings", "prefill_ended"])
async def test_closed_migration_fails_sequences_that_need_an_engine(way: str) -> None:
    chooser: Any = FullChooser()
    pending = PendingSequences(lambda *_: SimpleNamespace())  # type: ignore[arg-type]  # no text is decoded
    migration = Migration(RouterConfig(), chooser, HandleCounter(), pending, Transfers())
    queue = DeltaQueue[SequenceState]()
    job = make_job(n=2 if way == "start siblings" else 1)
    sequences = [make_sequence(job, queue, index) for index in range(job.n)]
    migration.close()
    if way == "prefill_ended":
        migration.prefill_ended(sequences[0])
    else:
        migration.start(sequences)
    assert all(sequence.client.ended for sequence in sequences) and isinstance(queue.error, Unavailable)
    assert not chooser.asked and not pending.waiting and migration._timer is None
