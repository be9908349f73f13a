"""Chooser: which replicas are tried for a sequence, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from quire_router.replicas.chooser import Chooser
from quire_router.sequences.delta_queue import DeltaQueue
from tests.unit.router.makers import make_job, make_sequence
from tests.unit.router_placement.fleet import Fleet, model


class ReplicaStub:
    """A replica that takes every sequence or none, and notes that its row was corrected."""

    def __init__(self, instance: str, *, takes: bool) -> None:
        self.instance = instance
        self.takes = takes
        self.published = 0

    def can_take(self, sequence: object) -> bool:
        return self.takes

    def publish(self) -> None:
        self.published += 1


class ReplicasByRow:
    """The part of the router's fleet that a chooser reads."""

    def __init__(self, fleet: Fleet, takes: list[bool]) -> None:
        self.table = fleet.table
        self.replicas = [ReplicaStub(f"replica-{index}", takes=one) for index, one in enumerate(takes)]
        self._by_row = {row.row: replica for row, replica in zip(fleet.rows, self.replicas, strict=True)}

    def at(self, row: int) -> ReplicaStub:
        return self._by_row[row]


@pytest.mark.parametrize(
    ("takes", "chosen"),
    [
        ([True, False, True], "replica-2"),
        ([True, False, False], "replica-0"),
        ([False, False, False], None),
    ],
)
def test_a_replica_to_avoid_is_the_last_resort(takes: list[bool], chosen: str | None) -> None:
    fleet = Fleet("least_loaded", len(takes))
    replicas: Any = ReplicasByRow(fleet, takes)
    chooser = Chooser(replicas, fleet.placer)
    sequence = make_sequence(make_job(), DeltaQueue())
    sequence.model = "m"
    replica = chooser.choose(sequence, avoid="replica-0")
    assert (replica.instance if replica is not None else None) == chosen
    assert all(one.published <= 1 for one in replicas.replicas), "each is asked at most once"
    loaded = [replicas.at(row).instance for row in fleet.table.pending_tokens.nonzero()[0].tolist()]
    assert loaded == ([] if chosen is None else [chosen]), "only the chosen replica has reserved load"


def test_tokens_of_a_client_bind_a_sequence_only_to_a_model_that_has_begun_to_run_it() -> None:
    fleet = Fleet("least_loaded", 1)
    fleet.add("replica-1", of=model(digest=b"other"))
    replicas: Any = ReplicasByRow(fleet, [True, True])
    chooser = Chooser(replicas, fleet.placer)
    sequence = make_sequence(make_job(), DeltaQueue())
    sequence.model = "m"
    sequence.engine.start_after(b"\1\0\0\0", with_entries=False)
    sequence.placement.bind_model(b"d")
    elsewhere = chooser.choose(sequence, shunned={"replica-0"})
    assert elsewhere is not None and elsewhere.instance == "replica-1", "the first has refused it"
    sequence.engine.admit(sequence.attempt, 0)
    assert chooser.choose(sequence, shunned={"replica-0"}) is None
