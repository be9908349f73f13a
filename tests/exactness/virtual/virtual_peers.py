"""Pages that go from one worker's device to another's in virtual time: late, in order, sometimes in part or wrong.

A page is on its way for a while; what it was when it was read is what arrives, or is refused by its checksum. Knows
schedulers by nothing but the moves that they grant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from quire_common.credit import MoveKind
from quire_worker.engine.transfer_agent import MoveResult
from tests.exactness.events import Events

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from quire_common.credit import PageMove
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.virtual.virtual_time import VirtualTime

# A puller looks again when it is told of more pages, and by itself after so long.
_LOOK_US = 20_000


@dataclass(frozen=True)
class PeerWeather:
    """How well pages travel. Shares are probabilities; times are virtual microseconds."""

    page_us: tuple[int, int] = (10, 200)
    """Of one page on its way: least and most."""
    begin_us: int = 500
    """Until a pull has found its export, at most."""
    refuse: float = 0.0
    """Moves that are not taken on at all."""
    corrupt: float = 0.0
    """Pages of which a bit changes on the way."""
    break_off: float = 0.0
    """Pages at which the connection ends for good."""


@dataclass(eq=False)
class _Export:
    transfer_agent: PeerAgent
    move: PageMove
    offered: int = 0
    pullers: int = 0


@dataclass(eq=False)
class _Pull:
    move: PageMove
    run: int
    arrived: int = 0
    over: bool = False


class Peers:
    """What may be pulled now, by address and lease."""

    def __init__(self) -> None:
        self.events = Events()
        self.exports: dict[tuple[bytes, bytes, int], _Export] = {}

    def find(self, move: PageMove) -> _Export | None:
        """What a pull asks for; None where nobody has it, or it is not the puller's to have."""
        descriptor = move.source[0].descriptor if move.source else b""
        export = self.exports.get((descriptor, move.lease, move.group))
        if export is None or export.move.lease_key != move.lease_key:
            self.events["pulls of nothing"] += 1
            return None
        theirs = export.move.hashes[move.first_index :][: len(move.hashes)]
        return export if theirs == move.hashes else None


class PeerAgent:
    """Implements KvTransferAgent. `address` is what this worker's hello says of it."""

    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        pages: PageBytes,
        peers: Peers,
        weather: PeerWeather,
        address: bytes,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.pages = pages
        self._time = time
        self._rng = rng
        self._peers = peers
        self._weather = weather
        self._address = address
        self._ended: list[MoveResult] = []
        self._pulls: dict[int, _Pull] = {}
        self._run = 0

    def submit(self, move: PageMove) -> bool:
        if move.kind not in (MoveKind.EXPORT, MoveKind.PULL) or self._chance(self._weather.refuse):
            self._peers.events["moves refused"] += 1
            return False
        if move.kind is MoveKind.EXPORT:
            self._peers.exports[self._address, move.lease, move.group] = _Export(self, move)
            return True
        pull = self._pulls[move.id] = _Pull(move, self._run)
        if self._rng.random() < 0.5:
            # From now on nobody may count on what these hold.
            self._rubbish(move.device_page.tolist())
        self._time.after(int(self._rng.integers(0, self._weather.begin_us + 1)), lambda: self._next(pull))
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        if (export := self._mine(move_id)) is not None:  # else it has ended, and is yet to be told of
            assert export.offered < pages <= len(export.move.device_page)
            export.offered = pages

    def end_move(self, move_id: int) -> None:
        """The peer is told a while later."""
        if (pull := self._pulls.get(move_id)) is not None:
            self._end_pull(pull)
        elif (export := self._mine(move_id)) is not None:
            self._forget(export)
            self._tell_late(MoveResult(move_id, ok=False, pages=0, us=1))

    def take_results(self) -> list[MoveResult]:
        ended, self._ended = self._ended, []
        return ended

    def cancel_all(self) -> None:
        self._run += 1
        for pull in self._pulls.values():
            pull.over = True
        self._pulls.clear()
        for export in [each for each in self._peers.exports.values() if each.transfer_agent is self]:
            self._forget(export)

    def close(self) -> None:
        self.cancel_all()

    def pulled(self, move: PageMove) -> None:
        """A puller has all that it wants of an export of this worker."""
        if self._mine(move.id) is not None:
            self._forget(self._peers.exports[self._address, move.lease, move.group])
            self._tell_late(MoveResult(move.id, ok=True, pages=len(move.device_page), us=1))

    def _next(self, pull: _Pull) -> None:
        """Send for the next page, or look again when it may be there."""
        if pull.over:
            return
        export, weather = self._peers.find(pull.move), self._weather
        if export is None or self._chance(weather.break_off):
            self._peers.events["pulls broken off"] += export is not None
            self._end_pull(pull)
            return
        place = pull.move.first_index + pull.arrived
        if place >= export.offered:
            self._peers.events["pulls ahead of prefill"] += 1
            self._time.after(int(self._rng.integers(1, _LOOK_US)), lambda: self._next(pull))
            return
        body = bytes(export.transfer_agent.pages.read_page(int(export.move.device_page[place])))
        checksum = crc32(body)
        if self._chance(weather.corrupt):
            at = int(self._rng.integers(len(body)))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        self._time.after(int(self._rng.integers(*weather.page_us)), lambda: self._land(pull, export, body, checksum))

    def _land(self, pull: _Pull, export: _Export, body: bytes, checksum: int) -> None:
        if pull.over:
            return
        if not genuine(body, checksum):
            self._peers.events["pages refused"] += 1
            self._end_pull(pull)
            return
        self.pages.write_page(int(pull.move.device_page[pull.arrived]), body)
        self._peers.events["pages pulled"] += 1
        pull.arrived += 1
        if pull.arrived < len(pull.move.device_page):
            self._next(pull)
            return
        export.transfer_agent.pulled(export.move)
        self._end_pull(pull)

    def _end_pull(self, pull: _Pull) -> None:
        pull.over = True
        del self._pulls[pull.move.id]
        wanted = pull.move.device_page.tolist()
        # What did not arrive whole may have arrived in part.
        self._rubbish(wanted[pull.arrived :])
        self._tell_late(MoveResult(pull.move.id, pull.arrived == len(wanted), pull.arrived, us=1))

    def _tell_late(self, result: MoveResult) -> None:
        run = self._run
        self._time.after(int(self._rng.integers(0, self._weather.begin_us + 1)), lambda: self._tell(run, result))

    def _tell(self, run: int, result: MoveResult) -> None:
        if run == self._run:
            self._ended.append(result)
            self.wake()

    def _mine(self, move_id: int) -> _Export | None:
        mine = (export for export in self._peers.exports.values() if export.transfer_agent is self)
        return next((export for export in mine if export.move.id == move_id), None)

    def _forget(self, export: _Export) -> None:
        del self._peers.exports[self._address, export.move.lease, export.move.group]

    def _rubbish(self, pages: list[int]) -> None:
        for page in pages:
            self.pages.write_page(page, bytes(self._rng.bytes(self.pages.page_bytes)))

    def _chance(self, share: float) -> bool:
        return bool(share) and bool(self._rng.random() < share)


def genuine(body: bytes, checksum: int) -> bool:
    """What a receiver asks of every page."""
    return crc32(body) == checksum
