"""Pull: one move's pages from another worker into the ring, on a thread of its own.

It goes on with the next transport where one breaks, and comes again while that leads to anything. A peer that was
there and says nothing more ends it: whoever hangs there hangs by every way. Where nobody has ever answered it may be
the network, and the next way is tried; what let nothing through is tried last for a while, by others too.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire_common.errors import NotFound, QuireError
from quire_common.kv_client import TransferCancelled
from quire_common.pages import PageCorrupt, PageRun
from quire_common.telemetry.logs import get_logger
from quire_worker.mover.load_lane import RingLanding
from quire_worker.mover.peers.closed_ways import ClosedWays
from quire_worker.mover.peers.peer_access import PeerAccess
from quire_worker.mover.peers.peer_port import FRAME_S
from quire_worker.mover.peers.pool_landing import PoolLanding
from quire_worker.mover.peers.tunnel_stream import TunnelDial
from quire_worker.mover.transports.data_link import DataLink
from quire_worker.mover.transports.peer_cuda import PeerCuda
from quire_worker.mover.transports.peer_grpc import PeerGrpc
from quire_worker.mover.transports.peer_nixl import PeerNixl
from quire_worker.mover.transports.peer_shm import PeerShm
from quire_worker.mover.transports.peer_tcp import PeerTcp
from quire_worker.mover.transports.transport import Cargo, TransportDown

if TYPE_CHECKING:
    from quire_worker.mover.ends import Equipment
    from quire_worker.mover.lane import Job
    from quire_worker.mover.load_lane import Slots
    from quire_worker.mover.peers.kept_connections import KeptConnections
    from quire_worker.mover.transports.shared_maps import SharedMaps
    from quire_worker.mover.transports.transport import Source

log = get_logger(__name__)
# A ticket may be here before its export is there.
EARLY_S = 1.0
AGAIN_S = 0.05
LATER_S = 0.2
# So often in a row all ways may break without a page having come.
FRUITLESS = 2


class Pull:
    """`run` and `close` are the thread's; `void` may be called from any. `used`: what carried pages last."""

    def __init__(
        self, job: Job, slots: Slots, given: Equipment, maps: SharedMaps, closed: ClosedWays, kept: KeptConnections
    ) -> None:
        self.job = job
        self.used = ""
        self.arrived: list[int] = []
        """Index and slot of pages that have landed and are not told of."""
        setup, move = given.setup, job.move
        run = PageRun(bytes.fromhex(setup.namespace), move.group, move.hashes)
        self._cargo = Cargo(run, setup.dtype, setup.page_bytes, PeerAccess.of(move), move.context)
        self._landing = RingLanding(slots, given.ring, job)
        self._closed = closed
        self._kept = kept
        self._complete = False
        self._tunnel = TunnelDial(setup.service_config())
        self._link, tunnelled = self._links = DataLink(FRAME_S), DataLink(FRAME_S, self._tunnel)
        self.direct = PoolLanding(job, self._landing, given.send, lambda: self.is_void)
        sources: list[Source[PeerAccess]] = [
            PeerCuda(self._link, self.direct),
            PeerShm(self._link, maps),
            PeerTcp(self._link),
            PeerGrpc(tunnelled),
        ]
        if given.nixl is not None:
            sources.append(PeerNixl(self._link, given.nixl))
        access = self._cargo.access
        if access.socket and (before := kept.take(access.socket)) is not None:
            self._link.take_up(access.socket, before)
        ways = [way for way in sources if setup.peer_transport in ("auto", way.name) and way.offered(access)]
        self._ways = sorted(ways, key=lambda way: closed.is_closed(way.name, access))
        # Only what the engine keeps listens before the process does that serves it.
        self._may_be_early = access.grpc is not None
        self._voided = threading.Event()

    @property
    def is_void(self) -> bool:
        """Whether nobody wants its pages any more."""
        return self._voided.is_set()

    def void(self) -> None:
        """End it."""
        self._voided.set()
        self.direct.look()
        for link in self._links:
            link.cut()

    def run(self) -> int:
        """How many pages have landed, from the first on, each being what its key says."""
        try:
            self._go_on()
            self._complete = self._landing.landed == len(self._cargo.run)
        except TransferCancelled:
            log.info("a pull was abandoned", arrived=self._landing.landed)
        except (PageCorrupt, QuireError) as error:
            log.warning(
                "a pull ended early", arrived=self._landing.landed, wanted=len(self._cargo.run), error=str(error)
            )
        finally:
            self._landing.tell()
            self._landing.close()
        return self._landing.landed

    def close(self) -> None:
        """Let go of connections, once `run` is over and told of: nobody waits for that. One on which all has come is
        left in order."""
        if self._complete and (left := self._link.hand_over()) is not None:
            self._kept.keep(*left)
        for way in self._ways:
            way.close()

    def _go_on(self) -> None:
        first_told_s: float | None = None
        began_s, fruitless = time.monotonic(), 0
        while fruitless < FRUITLESS and not self.is_void:
            before = self._landing.landed
            try:
                if self._try_all_ways():
                    return
            except NotFound as error:
                # From the first answer on: a process that has just begun may keep who comes in waiting for longer.
                first_told_s = first_told_s or time.monotonic()
                early = time.monotonic() - first_told_s < EARLY_S
                if error.code != "EXPORT_UNKNOWN" or self._landing.landed or not early:
                    raise
                for link in self._links:
                    link.close()
                self._voided.wait(AGAIN_S)
                continue
            if not self._landing.landed and self._may_be_early and time.monotonic() - began_s < EARLY_S:
                self._voided.wait(LATER_S)
                continue
            fruitless = fruitless + 1 if self._landing.landed == before else 0

    def _try_all_ways(self) -> bool:
        """Whether there is nothing more to try: all have come, or there is silence."""
        silent = False
        for way in self._ways:
            before = self._landing.landed
            try:
                way.fetch(self._cargo, self._landing)
            except TransportDown as error:
                log.warning("a pull is interrupted", transport=way.name, silent=error.silent, cause=str(error))
                self._landing.close()  # others may have the slot meanwhile
                if error.silent and not error.unreached:
                    return True
                if error.silent:
                    self._closed.close(way.name, self._cargo.access)
                # Who refuses is there, or has gone: the port of a process that has yet to start is worth a wait else.
                self._tunnel.patient = error.silent
                silent = silent or error.silent
                continue
            finally:
                if self._landing.landed > before:
                    self.used = way.name
            return True
        return silent
