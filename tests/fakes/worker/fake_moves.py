"""The fake worker's moves: to and from a store that is a dictionary, and from one fake worker to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind, PageMove

if TYPE_CHECKING:
    from tests.fakes.worker.fake_worker import FakeWorker

_WRITES = (MoveKind.LOAD, MoveKind.PULL)


@dataclass
class _Flight:
    move: PageMove
    turns: int
    # Pages that will arrive at most, and those that have.
    most: int
    arrived: int = 0


class FakeMoves:
    """`turn` at each boundary: what has ended, as ids, status and pages. Exports end when they were pulled."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._flights: list[_Flight] = []
        self._exports: dict[tuple[bytes, int], PageMove] = {}
        self._ended: list[tuple[int, int, int]] = []

    def __bool__(self) -> bool:
        """Something will end by itself."""
        return bool(self._flights or self._ended)

    @property
    def exporting(self) -> int:
        return len(self._exports)

    def begin(self, move: PageMove) -> None:
        worker, count = self._worker, len(move.device_page)
        if move.kind is MoveKind.EXPORT:
            assert (move.lease, move.group) not in self._exports, "a transfer is exported twice"
            self._exports[move.lease, move.group] = move
            return
        turns = int(worker.rng.integers(*worker.move_turns))
        most = count if worker.rng.random() >= worker.fail_moves else int(worker.rng.integers(0, count))
        self._flights.append(_Flight(move, turns, most))
        if move.kind in _WRITES:
            worker.marks[move.group].expect(move.device_page.tolist())

    def cancel(self, move_ids: list[int]) -> None:
        for move_id in move_ids:
            for key, move in list(self._exports.items()):
                if move.id == move_id:
                    del self._exports[key]
                    self._ended.append((move_id, 1, 0))
            for flight in [flight for flight in self._flights if flight.move.id == move_id]:
                self._end(flight)

    def turn(self) -> list[tuple[int, int, int]]:
        for flight in list(self._flights):
            flight.turns -= 1
            if flight.turns >= 0:
                continue
            if self._worker.refuse_moves:
                flight.most = 0
            elif self._worker.crowded_store and flight.move.kind is MoveKind.STORE:
                flight.most = len(flight.move.hashes) - 1
            if flight.move.kind is not MoveKind.PULL:
                self._carry(flight)
                self._end(flight)
            elif not self._pull(flight):
                self._end(flight)
        ended, self._ended = self._ended, []
        return ended

    def _carry(self, flight: _Flight) -> None:
        """To or from the store, which does not replace a page that it has."""
        move, kv = flight.move, self._worker.kv[flight.move.group]
        for page, digest in zip(move.device_page[: flight.most].tolist(), move.hashes, strict=False):
            key = bytes([move.group]) + digest
            if move.kind is MoveKind.STORE:
                self._worker.store.setdefault(key, kv[page].tolist())
            else:
                kv[page] = self._worker.store[key]
        flight.arrived = flight.most

    def _pull(self, flight: _Flight) -> bool:
        """Fetch what is ready; False where there is nothing (more) to wait for."""
        move = flight.move
        peer = self._worker.peers.get(move.source[0].descriptor)
        export = None if peer is None else peer.moves._exports.get((move.lease, move.group))
        if peer is None or export is None or export.lease_key != move.lease_key:
            return False
        while flight.arrived < flight.most:
            index = move.first_index + flight.arrived
            if export.hashes[index] != move.hashes[flight.arrived]:
                return False
            page, last = int(export.device_page[index]), index == len(export.hashes) - 1
            full = export.tail_tokens if last and export.tail_tokens else peer.page_size
            if peer.marks[move.group].filled(page) < full:
                return True
            mine = int(move.device_page[flight.arrived])
            self._worker.kv[move.group][mine, :full] = peer.kv[move.group][page, :full]
            flight.arrived += 1
        if flight.arrived == len(move.hashes):
            del peer.moves._exports[move.lease, move.group]
            peer.moves._ended.append((export.id, 0, len(export.hashes)))
        return False

    def _end(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        move, pages = flight.move, flight.move.device_page.tolist()
        self._ended.append((move.id, int(flight.arrived < len(pages)), flight.arrived))
        if move.kind in _WRITES:
            self._worker.marks[move.group].arrived(pages, flight.arrived, move.tail_tokens)
