"""AgentProcess: the engine's side of the KV transfer agent. It copies pages between page pool and ring; it does no I/O
and no hashing.

A move may have more pages than the ring has slots. Pages flow through the ring, a bounded number of bytes per call, so
that no step boundary is delayed. Loads go before stores. When the process dies or hangs, its moves end. A move with
missing pages fails, which counts as a cache miss and never as an error. KvTransferAgent states the contract, and
wire.py lists the frames.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.telemetry import metrics
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.copier import Copier
from quire_worker.kv_transfer.device_fetches import DeviceFetches
from quire_worker.kv_transfer.open_move import OpenMove
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.transports.registry import Traffic, names
from quire_worker.kv_transfer.wire import AgentFrameKind, pack_move, transport_name
from quire_worker.side_process.frames import Frame, WireError
from quire_worker.side_process.process_link import DEFAULT_TIMEOUTS, LinkTimeouts, ProcessKind, ProcessLink, ProcessLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quire_common.credit import PageMove
    from quire_worker.engine.transfer_agent import MoveResult

COMMAND = (sys.executable, "-m", "quire_worker.kv_transfer")
MAX_OPEN = 128
# An export that no peer pulls costs only an entry in a table.
MAX_EXPORTS = 1024
# Half a millisecond of copying on a CPU; the engine calls several times a step.
COPY_BYTES = 2 << 20
# On a GPU a copy is only asked for.
CUDA_COPY_BYTES = 128 << 20
# Slots go back together, while there is more to be copied out: this share of those that the process fills.
_RETURN_SHARE = 8
log = get_logger(__name__)
_USING = {
    False: ("quire_worker_kv_transport", "1 for what carried pages of the kvstore last"),
    True: ("quire_worker_peer_transport", "1 for what carried pages from or to another worker last"),
}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A page that is being copied between pool and ring."""

    open: OpenMove
    index: int
    slot: int


class AgentProcess:
    """A KvTransferAgent. The constructor starts the process. Calls `wake`, from any thread, when `take_results` has
    something to do. Owns `ring`."""

    def __init__(
        self,
        setup: AgentSetup,
        ring: Ring,
        copier: Copier,
        *,
        command: Sequence[str] = COMMAND,
        max_open: int = MAX_OPEN,
        copy_bytes: int = COPY_BYTES,
        timeouts: LinkTimeouts = DEFAULT_TIMEOUTS,
        inherited: Mapping[str, int] | None = None,
        can_fetch: bool = True,
    ) -> None:
        """`inherited`: further descriptors for the process, by the flags that name them. `can_fetch`: see
        DeviceFetches."""
        self.wake: Callable[[], None] = lambda: None
        self._setup = setup
        self._ring = ring
        self._copier = copier
        copier.wake = self._wake_once
        self._max_open = max_open
        self._copies_per_call = max(1, copy_bytes // setup.page_bytes)
        self._generation = 0
        self._incarnation = 1
        self._numbered = 0
        self._open: dict[int, OpenMove] = {}
        self._open_of: Counter[MoveKind] = Counter()
        # Moves with pages to put into the ring. Separate, since a thousand exports that no peer pulls may be open.
        self._wanting: dict[int, OpenMove] = {}
        self._number_of: dict[int, int] = {}
        self._ended: list[MoveResult] = []
        self._received: deque[_Copy] = deque()
        self._copying: deque[tuple[int, bool, list[_Copy]]] = deque()
        self._free = deque(setup.store_slots)
        # Store slots that the process was told of by FILLED, and has not released.
        self._filled: set[int] = set()
        self._emptied_slots: list[int] = []
        self._return_at = max(1, len(setup.load_slots) // _RETURN_SHARE)
        self._awake = False
        self._pages = metrics.counter("quire_worker_mover_pages_total", "Pages moved", ("kind", "transport"))
        using = metrics.gauge(*_USING[setup.peers], ("transport",))
        self._using = {name: using.labels(name) for name in names(Traffic.PEER if setup.peers else Traffic.STORE)}
        fds = {"--ring": ring.fd, **(inherited or {})}
        self._device_fetches = DeviceFetches(copier, self._tell_fetched, able=can_fetch)
        restarts = metrics.counter("quire_worker_mover_restarts_total", "Transfer agents that ended or hung")
        kind = ProcessKind("the transfer agent", tuple(command), AgentFrameKind, "mover-link", restarts.inc)
        self._link = ProcessLink(
            kind, Frame(AgentFrameKind.SETUP, payload=setup.to_json()), fds, self._wake_once, timeouts
        )

    @classmethod
    def start(
        cls,
        setup: AgentSetup,
        make_copier: Callable[[Ring], Copier],
        *,
        copy_bytes: int = COPY_BYTES,
        inherited: Mapping[str, int] | None = None,
    ) -> AgentProcess:
        """Make a ring and a copier for that ring, and return an AgentProcess that starts its process with them.
        `copy_bytes` bounds what one `take_results` copies through the ring, but it copies one page at least.
        `inherited` has descriptors for the process by flag. With a peers' setup, the copier is first prepared for
        fetches; if that fails, pulls use other transports."""
        ring = Ring.create(setup.page_bytes, setup.slots)
        try:
            copier = make_copier(ring)
            can_fetch = not setup.peers or _prepare_fetch(copier)
            return cls(setup, ring, copier, copy_bytes=copy_bytes, inherited=inherited, can_fetch=can_fetch)
        except BaseException:
            ring.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._link.pid

    def submit(self, move: PageMove) -> bool:
        """Send the move to the process and keep it as open. Returns False if the move's kind is not one of the
        process's, the move is open already, too many of its kind are, or no process can take frames now."""
        if move.kind not in self._setup.kinds or move.id in self._number_of:
            return False
        most = MAX_EXPORTS if move.kind == MoveKind.EXPORT else self._max_open
        if self._open_of[move.kind] >= most:
            return False
        number = self._numbered + 1
        if not self._send(pack_move(move, self._generation, number, time.time_ns())):
            return False
        self._numbered = self._number_of[move.id] = number
        self._open[number] = OpenMove(move, number)
        self._open_of[move.kind] += 1
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        """Allow the first `pages` pages of an export to be copied into the ring. If peers may read the engine's own
        memory, the process is told too. Unknown moves are ignored."""
        number = self._number_of.get(move_id)
        if number is not None:
            self._open[number].offer(pages)
            if self._setup.shares_memory:
                self._send(Frame.of(AgentFrameKind.OFFERED, self._generation, number, [pages]))

    def end_move(self, move_id: int) -> None:
        """Tell the process to drop a move, and take back its pages in the ring. The move ends as failed, with its pages
        in the pool, once its running copies and fetches have ended. Unknown moves are ignored."""
        number = self._number_of.get(move_id)
        if number is None:
            return
        opened = self._open[number]
        self._send_cancellation(Frame(AgentFrameKind.CUT, self._generation, number))
        dropped = [copy.slot for copy in self._received if copy.open is opened]
        self._received = deque(copy for copy in self._received if copy.open is not opened)
        opened.cut_off(len(dropped))
        self._return_slots(dropped)
        self._end_if_finished(opened)

    def take_results(self) -> list[MoveResult]:
        """Handle the process's frames, and copy a bounded number of pages: arrived ones from the ring, then wanted ones
        into it. Returns the results of moves that have ended since the last call. Slots whose pages have reached the
        pool go back to the process, several at a time while more pages arrive. Calls `wake` if more can be copied at
        once."""
        self._awake = False
        while (frame := self._link.take_frame()) is not None:
            self._receive_frame(frame)
        if self._has_page_work:
            self._copy_pages()
        ended, self._ended = self._ended, []
        return ended

    @property
    def _has_page_work(self) -> bool:
        """Whether `_copy_pages` may find something to do. The engine asks several times a step, mostly in vain."""
        at_ring = self._received or self._copying or self._wanting or self._emptied_slots
        return bool(at_ring) or self._device_fetches.is_fetching

    def _copy_pages(self) -> None:
        """Handle ended copies, and begin a bounded number of others: see `take_results`."""
        self._finish_copies()
        left = self._copy_in(self._copies_per_call)
        left = self._copy_out(left)
        self._finish_copies()
        if len(self._emptied_slots) >= self._return_at or not (self._received or self._copying):
            self._return_slots(())
        if not left and (self._received or self._copyable()):
            self._wake_once()

    def cancel_all(self) -> None:
        """Forget all moves, which get no result, wait for copies under way, and tell the process. The slots of these
        moves become free, and frames of them that still come are dropped."""
        self._generation += 1
        self._awake = False
        self._open.clear()
        self._open_of.clear()
        self._wanting.clear()
        self._number_of.clear()
        self._ended = []
        self._copier.drain()
        landed = [copy.slot for copy in self._received]
        for _, to_ring, copies in self._copying:
            (self._free if to_ring else landed).extend(copy.slot for copy in copies)
        self._received.clear()
        self._copying.clear()
        self._device_fetches.drop()
        self._send_cancellation(Frame(AgentFrameKind.CANCEL, self._generation))
        self._return_slots(landed)

    def close(self) -> None:
        """End the process, and close the copier and the ring. Open moves are not reported. If the wait for copies
        raises, by DEVICE_HUNG or an error of the GPU, the ring stays open."""
        self._link.close()
        self._copier.close()
        self._ring.close()

    def _receive_frame(self, frame: Frame | ProcessLost) -> None:
        """Handle a frame, or the loss of the process. A process that sends an invalid frame is killed and replaced."""
        if isinstance(frame, ProcessLost):
            self._on_agent_lost()
            return
        try:
            self._handle_frame(frame)
        except (WireError, ValueError) as error:
            self._give_up(f"it sends nonsense: {error}")

    def _handle_frame(self, frame: Frame) -> None:
        """Carry out a frame of the process: free slots, queue arrived or wanted pages, begin or keep fetches, or end a
        move and count its pages. Slots of moves that are over, cut or of an earlier generation go back at once; their
        other frames are ignored. Raises WireError or ValueError for an invalid frame."""
        if frame.kind == AgentFrameKind.RELEASED:
            slots = frame.numbers()
            _check_slots(slots, self._setup.store_slots)
            if len(set(slots)) < len(slots) or not self._filled.issuperset(slots):
                raise WireError("it releases a slot that it does not have")
            self._filled.difference_update(slots)
            self._free.extend(slots)
            return
        opened = self._open.get(frame.subject) if frame.generation == self._generation else None
        if opened is not None and opened.cut:
            opened = None
        if frame.kind == AgentFrameKind.ARRIVED:
            pairs = frame.pairs()
            _check_slots([slot for _, slot in pairs], self._setup.load_slots)
            if opened is None:
                self._return_slots([slot for _, slot in pairs])
                return
            for index, slot in pairs:
                if not opened.fills_pool or not opened.in_ring == index < len(opened.move.device_page):
                    raise WireError(f"page {index} after {opened.in_ring} pages")
                opened.record_arrival()
                self._received.append(_Copy(opened, index, slot))
        elif frame.kind == AgentFrameKind.WANTED:
            if opened is not None:
                indices = frame.numbers()
                if opened.fills_pool or not all(0 <= index < len(opened.move.device_page) for index in indices):
                    raise WireError("it wants pages that the move has not")
                opened.add_wanted(indices)
                self._wanting[opened.number] = opened
        elif frame.kind == AgentFrameKind.FETCH:
            if opened is not None:
                self._device_fetches.begin(opened, frame.column())
        elif frame.kind == AgentFrameKind.KEPT:
            if opened is not None:
                self._device_fetches.keep(opened, frame.number())
        elif frame.kind == AgentFrameKind.ENDED:
            pages, code = frame.numbers()
            if opened is not None:
                self._count(opened.move.kind, pages, transport_name(code))
                self._device_fetches.end(opened, pages)
                opened.end(pages)
                self._end_if_finished(opened)
        else:
            raise WireError(f"{frame.kind.name} is none of the transfer agent's")

    def _count(self, kind: MoveKind, pages: int, transport: str) -> None:
        """Count an ended move's pages by kind and transport, and show this transport as the one used last (none, if it
        is empty). For stores, pages that were there already count too."""
        self._pages.labels(kind.name.lower(), transport or "none").inc(max(0, pages))
        for name, gauge in self._using.items():
            gauge.set(name == transport)

    def _copy_in(self, left: int) -> int:
        """Begin to copy arrived pages from the ring into the pool, at most `left`; returns how many more copies this
        call may begin, none after an error."""
        copies = []
        while left and self._received:
            copy = self._received.popleft()
            if not self._begin(self._copier.to_page, copy):
                left = 0
                break
            copies.append(copy)
            left -= 1
        self._record_copies(copies, to_ring=False)
        return left

    def _copy_out(self, left: int) -> int:
        """Begin to copy wanted pages from the pool into free ring slots, at most `left`; returns how many more copies
        this call may begin, none after an error."""
        while left and (opened := self._copyable()) is not None:
            copies = []
            while left and self._free and opened.can_copy():
                copy = _Copy(opened, opened.wanted.popleft(), self._free.popleft())
                if not self._begin(self._copier.to_ring, copy):
                    left = 0
                    break
                copies.append(copy)
                left -= 1
            self._record_copies(copies, to_ring=True)
        return left

    def _copyable(self) -> OpenMove | None:
        """Return a move with a page to copy into the ring; None if there is none or no slot is free. Moves that need no
        further page are removed from the list of candidates."""
        if not self._free:
            return None
        for number, opened in list(self._wanting.items()):
            if opened.can_copy():
                return opened
            if not opened.wanted:
                del self._wanting[number]
        return None

    def _begin(self, copy_page: Callable[[int, int], None], copy: _Copy) -> bool:
        """Begin one copy by `copy_page(page of the pool, slot)`; returns whether it has begun. If that raises, the
        error is logged, and the process is killed and replaced. So its moves end as misses: an error of a cache must
        not reach a user."""
        try:
            copy_page(int(copy.open.move.device_page[copy.index]), copy.slot)
        except Exception:
            log.exception("a page could not be copied")
            self._give_up("a page could not be copied")
            return False
        copy.open.begin_copy()
        return True

    def _record_copies(self, copies: list[_Copy], *, to_ring: bool) -> None:
        """Note copies that were begun together, with the ticket that tells their end."""
        if copies:
            self._copying.append((self._copier.record_event(), to_ring, copies))

    def _finish_copies(self) -> None:
        """Handle copies and fetches that have ended: tell the process of filled slots, collect emptied ones, and end
        moves that are complete."""
        while self._copying and self._copier.is_complete(self._copying[0][0]):
            _, to_ring, copies = self._copying.popleft()
            if to_ring:
                pairs = [number for copy in copies for number in (copy.index, copy.slot)]
                self._filled.update(copy.slot for copy in copies)
                self._send(Frame.of(AgentFrameKind.FILLED, self._generation, copies[0].open.number, pairs))
            else:
                self._emptied_slots += [copy.slot for copy in copies]
            for copy in copies:
                copy.open.finish_copy(to_ring=to_ring)
                self._end_if_finished(copy.open)
        for opened in self._device_fetches.finish_fetches():
            self._end_if_finished(opened)

    def _end_if_finished(self, opened: OpenMove) -> None:
        """Add a move's result to those to be returned, and forget the move, if it is finished."""
        if opened.is_finished() and self._open.pop(opened.number, None) is not None:
            self._open_of[opened.move.kind] -= 1
            self._wanting.pop(opened.number, None)
            del self._number_of[opened.move.id]
            self._ended.append(opened.result())

    def _on_agent_lost(self) -> None:
        """Take in that the process is gone: wait for running copies, then end all moves. A load or pull whose pages are
        all in the pool already succeeds, unless it was cut; each other move fails, with the pages that are in the pool.
        All store slots count as free. Begin a new incarnation, so that later frames go to the next process, and set the
        ring's count of cancellations to 0, since the next process would wait for those of this one."""
        self._copier.drain()
        self._drop_copies()
        self._device_fetches.drop()
        for opened in list(self._open.values()):
            opened.lose_process()
            self._end_if_finished(opened)
        self._wanting.clear()
        self._received.clear()
        self._emptied_slots.clear()
        self._free = deque(self._setup.store_slots)
        self._filled.clear()
        self._ring.cancellations = 0
        self._incarnation += 1

    def _drop_copies(self) -> None:
        """Count all copies, which have ended, as finished, without telling the process."""
        for _, to_ring, copies in self._copying:
            for copy in copies:
                copy.open.finish_copy(to_ring=to_ring)
        self._copying.clear()

    def _tell_fetched(self, opened: OpenMove, pages: int) -> None:
        """Tell the process how many pages of a pull were fetched."""
        self._send(Frame.of(AgentFrameKind.FETCHED, self._generation, opened.number, [pages]))

    def _give_up(self, reason: str) -> None:
        self._link.give_up(self._incarnation, reason)

    def _return_slots(self, slots: Sequence[int]) -> None:
        """Tell the process that these slots, and those emptied before, are free again."""
        slots, self._emptied_slots = [*self._emptied_slots, *slots], []
        if slots:
            self._send(Frame.of(AgentFrameKind.RETURNED, 0, 0, slots))

    def _send_cancellation(self, frame: Frame) -> None:
        """Send a cancellation frame, but first count it in the ring: so peers can get nothing of the ended moves before
        the process reads the frame. If there is no process and the frame is not accepted for the next one, the
        cancellation is not counted, since the next process would wait for a frame that never comes."""
        gone = self._link.pid is None  # as seen before: one that begins meanwhile is sent the frame
        self._ring.cancellations += 1
        if not self._send(frame) and gone:
            self._ring.cancellations -= 1

    def _send(self, frame: Frame) -> bool:
        return self._link.send(self._incarnation, frame)

    def _wake_once(self) -> None:
        """Call `wake`, but at most once between two calls of `take_results`, since a long step may keep the model
        thread from that."""
        if not self._awake:
            self._awake = True
            self.wake()


def _check_slots(slots: Sequence[int], allowed: range) -> None:
    """Raise WireError if the process names a slot that is not allowed, so that no copy reads or writes it."""
    for slot in slots:
        if slot not in allowed:
            raise WireError(f"slot {slot} is none of {allowed.start} to {allowed.stop - 1}")


def _prepare_fetch(copier: Copier) -> bool:
    """Prepare the copier to read other workers' memory; returns False if that fails, which is logged. Pulls then use
    other transports."""
    try:
        copier.prepare_fetch()
    except Exception:  # out of memory, a kernel that cannot be compiled
        log.exception("pages cannot be fetched from other workers' memory here; they come by other ways")
        return False
    return True
