"""Finds a replica for a sequence. The replica table says which replicas could run the sequence, and the placement
policy chooses the best of them. The chooser then asks this replica object whether it can take the sequence now. If it
cannot, its row in the table was out of date: the chooser updates the row, and tries the remaining replicas.
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
    """The replicas that are to run one sequence. If `prefill` is None, `decode` runs the whole sequence. Otherwise
    `prefill` computes the prompt, `decode` continues, and `decode_load` is the load that is reserved at `decode`."""

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
        """Choose a replica that can take the sequence and its siblings (`weight` sequences in all) now, and reserve
        their load there. The sequence keeps the reservation, and the time that this took goes to the metrics. A replica
        that the table names but that cannot take the sequence is skipped, and its row is corrected. Returns None if no
        replica can take it.

        Replicas in `shunned` are left out. Replicas whose role does not fit are chosen only if none that fits can take
        the sequence. The replica `avoid` comes last, even if its role fits.
        """
        started_ns = time.perf_counter_ns()
        rows = self._able_rows(sequence, shunned)
        last = rows[:0]
        if avoid:
            to_avoid = np.array([self._fleet.at(row).instance == avoid for row in rows.tolist()], np.bool_)
            rows, last = rows[~to_avoid], rows[to_avoid]
        request = PlacementRequest(sequence.to_submit(), weight, _session(sequence), sequence.placement.page_hashes)
        while len(rows) or len(last):
            if not len(rows):
                rows, last = last, last[:0]
            placed = self._placer.place(request, self._fitting_rows(sequence, rows))
            replica = self._replica_for(sequence, placed)
            if replica is not None:
                _reserve_load(sequence, placed)
                metrics.placement.observe((time.perf_counter_ns() - started_ns) / 1e9)
                return replica
            rows = rows[rows != placed.row]
        return None

    def choose_sides(self, sequence: SequenceState, shunned: Container[str] = ()) -> Sides | None:
        """Choose a replica for one new sequence or, if that is faster, one replica to prefill it and another to decode
        it. Reserve its load at each; the sequence keeps the reservation of the replica that begins it, and the time
        that this took goes to the metrics. If one of them cannot take it now, release both, correct its row, and choose
        again without it. Returns None if no replica can take the sequence now. Replicas in `shunned` are left out."""
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
        """Return the table rows of replicas that accept the sequence and are not in `shunned`. A sequence needs a
        replica with a model of its name. If it is bound to a model, it needs instead a model with the same digest,
        under any name, with room for its greatest length. A sequence with a constraint needs a replica that can apply
        it."""
        fleet, digest, constraint = self._fleet, sequence.bound_digest, sequence.spec.constraint
        needed = "" if constraint is None else capability_for(constraint)
        rows = fleet.table.accepting_rows(sequence.model, digest, sequence.max_len, structured_output=needed)
        if shunned:
            rows = np.array([row for row in rows.tolist() if fleet.at(row).instance not in shunned], np.intp)
        return rows

    def _fitting_rows(self, sequence: SequenceState, rows: Rows) -> Rows:
        """Return the rows whose role fits the job. An export of KV pages goes to replicas of role `prefill`, or else to
        those that also prefill; any other job goes to those that decode. Returns all rows if no role fits."""
        table = self._fleet.table
        if sequence.job.kv_export:
            fit = [table.prefills(rows, whole_too=False), table.prefills(rows, whole_too=True)]
        else:
            fit = [table.decodes(rows)]
        return next((some for some in fit if len(some)), rows)

    def _replica_for(self, sequence: SequenceState, placed: LoadReservation) -> Replica | None:
        """Return the replica of a placement if it can take the sequence now. If not, release the reserved load, update
        the replica's row in the table, and return None."""
        replica = self._fleet.at(placed.row)
        if replica.can_take(sequence):
            return replica
        placed.release()
        replica.publish()
        return None


def _reserve_load(sequence: SequenceState, placed: LoadReservation) -> None:
    """Store the load reservation in the sequence, which releases it later. `held_tokens` is stored only for a new
    sequence."""
    # If the sequence ran before, an engine may have stored more of its pages than the router knows of.
    ran = sequence.submitted or sequence.engine.output_ids
    sequence.placement.reserve_load(placed, None if ran else placed.held_tokens)


def _session(sequence: SequenceState) -> str:
    """Return the name of the job's session, prefixed with its tenant; '' if the job has no session."""
    return f"{sequence.context.tenant}:{sequence.job.session}" if sequence.job.session else ""
