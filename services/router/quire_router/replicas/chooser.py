"""Finds a replica for a sequence: who could run it, by the table; the best of them, by the placement; who really
can, by its own word. Where the table is behind, the row is brought up to date and the rest are asked again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.structured.capability import capability_for
from quire_router import metrics
from quire_router.placement.placement_request import PlacementRequest

if TYPE_CHECKING:
    from collections.abc import Container

    from quire_common.credit.hello import Epoch
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.placement.placer import Placer
    from quire_router.placement.replica_table import Rows
    from quire_router.replicas.fleet import Fleet
    from quire_router.replicas.replica import Replica
    from quire_router.sequences.sequence_state import SequenceState


class Sides(NamedTuple):
    """`prefill` None: `decode` runs the sequence as a whole. Else `decode_load` is what was reserved at the decode
    side."""

    decode: Replica
    prefill: Replica | None
    decode_load: LoadReservation


class Chooser:
    """One per process; all methods run in the event loop."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet = fleet
        self._placer = placer

    def choose(
        self, sequence: SequenceState, weight: int = 1, shunned: Container[str] = (), avoid: str = ""
    ) -> Replica | None:
        """Choose a replica that can take the sequence and its siblings, `weight` in all, now; reserve their load there.
        Returns None where none can.

        Replicas in `shunned` are not asked. The replica `avoid`, and those of an unfit role, are asked only where there
        is no other.
        """
        started_ns = time.perf_counter_ns()
        rows = self._able_rows(sequence, shunned)
        if avoid and len(rows) > 1:
            rows = np.array([row for row in rows.tolist() if self._fleet.at(row).instance != avoid], np.intp)
        request = PlacementRequest(sequence.to_submit(), weight, _session(sequence), sequence.placement.page_hashes)
        while len(rows):
            placed = self._placer.place(request, self._fitting_rows(sequence, rows))
            replica = self._replica_for(sequence, placed)
            if replica is not None:
                _reserve_load(sequence, placed)
                metrics.placement.observe((time.perf_counter_ns() - started_ns) / 1e9)
                return replica
            rows = rows[rows != placed.row]
        return None

    def choose_sides(self, sequence: SequenceState, shunned: Container[str] = ()) -> Sides | None:
        """Choose a replica for one new sequence or, where that pays, two to decode and to prefill it; reserve its load
        at each. Returns None where none can take it now."""
        started_ns = time.perf_counter_ns()
        rows = self._able_rows(sequence, shunned)
        request = PlacementRequest(sequence.to_submit(), 1, _session(sequence), sequence.placement.page_hashes)
        while len(rows):
            placed = self._placer.place_sides(request, rows)
            decode = self._replica_for(sequence, placed.decode)
            prefill = self._replica_for(sequence, placed.prefill) if placed.prefill is not None else None
            if decode is not None and (prefill is not None or placed.prefill is None):
                _reserve_load(sequence, placed.prefill or placed.decode)
                metrics.placement.observe((time.perf_counter_ns() - started_ns) / 1e9)
                return Sides(decode, prefill, placed.decode)
            for one, replica in ((placed.decode, decode), (placed.prefill, prefill)):
                if one is not None:
                    one.release()
                    rows = rows if replica is not None else rows[rows != one.row]
        return None

    def accepting(self, sequence: SequenceState) -> list[Replica]:
        """Return all replicas that could run the sequence now."""
        return self._fleet.accepting(sequence)

    def epoch_of(self, instance: str) -> Epoch | None:
        return self._fleet.epoch_of(instance)

    def still_runs(self, instance: str, epoch: Epoch) -> bool:
        return self._fleet.still_runs(instance, epoch)

    def _able_rows(self, sequence: SequenceState, shunned: Container[str]) -> Rows:
        """Return the rows that accept the sequence, without `shunned`. A sequence with tokens is bound to the very
        model that made them, one with a constraint to replicas that can apply it."""
        fleet, bound = self._fleet, bool(sequence.engine.output_ids and sequence.placement.digest)
        digest, constraint = sequence.placement.digest if bound else None, sequence.spec.constraint
        needed = "" if constraint is None else capability_for(constraint)
        rows = fleet.table.able(sequence.model, digest, sequence.max_len, structured_output=needed)
        if shunned:
            rows = np.array([row for row in rows.tolist() if fleet.at(row).instance not in shunned], np.intp)
        return rows

    def _fitting_rows(self, sequence: SequenceState, rows: Rows) -> Rows:
        """Return the rows whose role fits the job (prefill for an export, else decode), or all rows where none has
        it."""
        table = self._fleet.table
        if sequence.job.kv_export:
            fit = [table.prefills(rows, whole_too=False), table.prefills(rows, whole_too=True)]
        else:
            fit = [table.decodes(rows)]
        return next((some for some in fit if len(some)), rows)

    def _replica_for(self, sequence: SequenceState, placed: LoadReservation) -> Replica | None:
        """Return the replica of a placement if it can take the sequence. If not, release the load, bring the replica's
        row up to date, and return None."""
        replica = self._fleet.at(placed.row)
        if replica.can_take(sequence):
            return replica
        placed.release()
        replica.publish()
        return None


def _reserve_load(sequence: SequenceState, placed: LoadReservation) -> None:
    """Store the reservation in the sequence, which releases it later. `held_tokens` are stored only if the sequence is
    new."""
    # Of a sequence that ran before, an engine may have stored more than it has reported.
    ran = sequence.submitted or sequence.engine.output_ids
    sequence.placement.reserve_load(placed, None if ran else placed.held_tokens)


def _session(sequence: SequenceState) -> str:
    """Return the name of the job's session, within its tenant; '' where it has none."""
    return f"{sequence.context.tenant}:{sequence.job.session}" if sequence.job.session else ""
