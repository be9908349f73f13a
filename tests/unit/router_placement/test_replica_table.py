"""The replica table adds, reuses and drops rows, and keeps what replicas report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire_router.placement.load import Load
from quire_router.placement.load_reservation import LoadReservation
from quire_router.placement.replica_table import ReplicaTable
from tests.unit.router_placement.fleet import model


def test_accepting_rows_has_replicas_that_accept_the_model() -> None:
    table = ReplicaTable()
    rows = [table.add(name) for name in "abcd"]
    rows[0].publish(accepts=True, model=model())
    rows[1].publish(accepts=False, model=model())
    rows[2].publish(accepts=True, model=model("other"))
    rows[3].publish(accepts=True, model=model(digest=b"e"))
    assert table.accepting_rows("m", None, 10**9).tolist() == [0, 3], "the length is the request's own affair"
    assert table.accepting_rows("m", b"e", 4096).tolist() == [3]
    assert not len(table.accepting_rows("m", b"e", 4097)) and not len(table.accepting_rows("unheard", None, 0))
    assert not len(table.accepting_rows("m", b"unheard", 0))


def test_replica_that_applies_constraints_of_two_versions_takes_both() -> None:
    table = ReplicaTable()
    older, newer = (f"structured_output:llguidance-{version}" for version in ("1.0.0", "2.0.0"))
    for name, capabilities in (("a", ()), ("b", (older,)), ("c", ("top_k", older, newer)), ("d", (newer,))):
        table.add(name).publish(accepts=True, model=replace(model(), capabilities=capabilities))
    assert table.accepting_rows("m", None, 0, structured_output=older).tolist() == [1, 2]
    assert table.accepting_rows("m", None, 0, structured_output=newer).tolist() == [2, 3]
    assert not len(table.accepting_rows("m", None, 0, structured_output="structured_output:llguidance-3.0.0"))


def test_reused_row_ignores_its_former_owner() -> None:
    table = ReplicaTable()
    first = table.add("a")
    first.publish(accepts=True, model=model())
    first.set_load(Load("ready", running=3, max_num_seqs=8, waiting_prefill_tokens=70))
    late = LoadReservation(table, first.row, 1, 100)
    first.drop()
    assert not len(table.accepting_rows("m", None, 0)) and not table.several
    second = table.add("b")
    assert second.row == first.row and table.queue(np.array([0])).tolist() == [0]
    second.publish(accepts=True, model=model())
    first.publish(accepts=False, model=model())
    first.set_load(Load("ready", running=9))
    first.set_holder(7)
    first.drop()
    late.release()
    assert table.accepting_rows("m", None, 0).tolist() == [0] and table.holder[0] == -1
    assert table.load(np.array([0])).tolist() == [0.0] and table.pending_tokens[0] == 0


def test_table_keeps_its_rows_when_it_grows() -> None:
    table = ReplicaTable()
    for index in range(100):
        row = table.add(f"r{index}")
        row.publish(accepts=True, model=model())
        row.set_holder(index)
        row.set_load(Load("ready", running=index, max_num_seqs=100))
    rows = table.accepting_rows("m", None, 0)
    assert rows.tolist() == table.holder[rows].tolist() == table.running[rows].tolist() == list(range(100))
    assert table.several and len(table.pools) == 1


def test_reserved_load_counts_until_released_or_reported() -> None:
    table = ReplicaTable()
    row = table.add("a")
    rows = np.array([0])
    placed = [LoadReservation(table, 0, 2, 100), LoadReservation(table, 0, 1, 50)]
    assert table.queue(rows).tolist() == [150] and table.load(rows).tolist() == [3.0]
    row.set_load(Load("ready", running=1, waiting=2, max_num_seqs=10, waiting_prefill_tokens=90))
    assert table.queue(rows).tolist() == [150] and table.load(rows).tolist() == [0.3]
    placed[0].release()
    placed[0].release()
    assert table.queue(rows).tolist() == [90], "others' requests, as the replica says"
    placed[1].release()
    quick = LoadReservation(table, 0, 1, 40)
    assert table.queue(rows).tolist() == [130]
    quick.release()
    assert table.queue(rows).tolist() == [90], "begun before the replica spoke again"
    row.set_load(Load("ready"))
    assert table.queue(rows).tolist() == [0]
