"""Copier: pages between the engine's pool and the ring. This module knows nothing of moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire_common.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.arrays import Int32
    from quire_worker.engine.ports import PageBytes
    from quire_worker.kv_transfer.ring import Ring


class Copier(Protocol):
    """Copies pages. Called from the model thread, except `prepare_fetch`, and `drain` and `close` at the end. These
    three may take long. Where a device copies, the others normally only enqueue.

    A page that is stored is whole and stays referenced until its move is reported. A page that is loaded has no reader
    before its move is reported. So on the CPU, a copy may run at any time in the model thread's loop. On a GPU, streams
    read and write the pages. There, `to_ring` must be enqueued behind the step that filled the page (wait for its
    event), and steps that read a loaded page behind `to_page` (`is_complete` says when that has ended). `record_event`
    records an event.
    """

    wake: Callable[[], None]
    """Set by the KV transfer agent; called, from any thread, when a ticket has passed that had not at its
    `record_event`."""

    def to_ring(self, page: int, slot: int) -> None:
        """Begin to copy a page of the pool into a slot."""

    def to_page(self, page: int, slot: int) -> None:
        """Begin to copy a slot into a page of the pool."""

    def prepare_fetch(self) -> None:
        """Do what would make the first `fetch` slow. Called before the model thread is the caller, if at all."""

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        """Begin to copy pages out of another worker's memory, which the descriptor names, into pages of the pool.
        Raises Unavailable if this process cannot open that memory, InvalidArgument if it lacks such pages."""

    def record_event(self) -> int:
        """Return a ticket for all copies begun so far."""

    def is_complete(self, ticket: int) -> bool:
        """Whether the copies of that ticket, and all copies before it, have ended."""

    def drain(self) -> None:
        """Wait for all copies that were begun. Raises DEVICE_HUNG if they take too long, and an error of the device."""

    def close(self) -> None:
        """Wait for all copies for a limited time, and release the ring. Raises DEVICE_HUNG if the copies take too long,
        and an error of the device."""


class HostCopier:
    """A copier for a pool in main memory. Each copy is complete when the call that begins it returns."""

    def __init__(self, pool: PageBytes, ring: Ring) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._pool = pool
        self._ring = ring

    def to_ring(self, page: int, slot: int) -> None:
        with self._ring.slot(slot) as view:
            view[:] = self._pool.read_page(page)

    def to_page(self, page: int, slot: int) -> None:
        with self._ring.slot(slot) as view:
            self._pool.write_page(page, view)

    def prepare_fetch(self) -> None: ...

    def fetch(self, memory: bytes, source: Int32, target: Int32) -> None:
        raise Unavailable("NO_GPU", "Pages in main memory come through the ring.", "Use another --peer-transport.")

    def record_event(self) -> int:
        return 0

    def is_complete(self, ticket: int) -> bool:
        return True

    def drain(self) -> None: ...

    def close(self) -> None: ...
