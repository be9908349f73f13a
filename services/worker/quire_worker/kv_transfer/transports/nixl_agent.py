"""SharedNixlAgent: the NIXL agent of a KV transfer agent's process. Peers read this ring by it, and it reads theirs. It
knows nothing of leases.

The NIXL agent is made when it is needed and closed when unused for a while, since its threads never sleep. It reads
pages into memory areas of its own, and they are copied from there. A read that was abandoned may still finish later; it
then writes to an area that is not used again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.kv_data.frame import DataConnectionError
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from quire_worker.kv_transfer.ring import Ring

log = get_logger(__name__)
IDLE_S = 2.0
# For one request: a read takes no part in the data connection's own limits, and a peer waits no longer.
READ_S = 2.0
_POLL_S = 20e-6
_MEMORY = "DRAM"


class SharedNixlAgent:
    """Used by any thread. Only one thread at a time calls NIXL itself."""

    def __init__(self, ring: Ring, idle_s: float = IDLE_S) -> None:
        self._ring = ring
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._users = 0
        self._timer: threading.Timer | None = None
        self._begun = threading.Event()

    def begin(self) -> None:
        """Make an agent on a thread and return at once. The first agent takes seconds, since it loads what all of them
        need."""
        threading.Thread(target=self._begin, name="nixl-start", daemon=True).start()

    def await_begun(self, timeout_s: float) -> bool:
        """Wait, at most for `timeout_s`, until the first agent was made or has failed. Returns whether that came in
        time; then `using` is not slow."""
        return self._begun.wait(timeout_s)

    @contextlib.contextmanager
    def using(self) -> Iterator[NixlAgent]:
        """Yield the agent. If there is none, it is made, and other users wait meanwhile. It is closed when it has not
        been used for `idle_s`. If the system has no thread left that could close it later, it is closed after this use.
        Raises DataConnectionError if it cannot be made."""
        with self._lock:
            if self._agent is None:
                self._agent = NixlAgent(self._ring)
            agent = self._agent
            self._users += 1
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        try:
            yield agent
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._schedule_close(agent)

    def _begin(self) -> None:
        """Make an agent once, which loads NIXL, then let those go on that wait in `await_begun`; an error is logged."""
        try:
            with self.using():
                pass
        except DataConnectionError as error:
            log.error("no pages go by NIXL", cause=str(error))
        finally:
            self._begun.set()

    def _schedule_close(self, agent: NixlAgent) -> None:
        """Start the timer that closes the agent. If no thread is left for the timer, close the agent at once. The
        caller holds the lock."""
        timer = threading.Timer(self._idle_s, self._close_idle)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            agent.close()
            self._agent = None
        else:
            self._timer = timer

    def _close_idle(self) -> None:
        """Close the agent, unless somebody has used it since this timer began."""
        with self._lock:
            if self._agent is not None and not self._users and self._timer is threading.current_thread():
                self._agent.close()
                self._agent = self._timer = None


class NixlAgent:
    """One NIXL agent, from its start to its end. `base` is the ring's address. `metadata` is for peers, who can read
    and write the memory that it names: the ring's alone, since it is taken in the constructor. Raises
    DataConnectionError if NIXL is not installed or does not start."""

    def __init__(self, ring: Ring) -> None:
        self._lock = threading.Lock()
        self._page_bytes = ring.page_bytes
        self._areas: list[NDArray[np.uint8]] = []
        self._made: list[NDArray[np.uint8]] = []
        self._peers: dict[str, int] = {}
        self.base = int(np.frombuffer(ring.memory, np.uint8).ctypes.data)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        with _failures():
            from nixl import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # an optional package

            self._nixl: Any = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=["UCX"]))
            self._nixl.register_memory([(self.base, len(ring.memory), 0, "")], _MEMORY)
            self.metadata: bytes = self._nixl.get_agent_metadata()

    def close(self) -> None:
        """End NIXL's agent, ignoring its errors, and only then free the memory areas: an abandoned read may write there
        until then."""
        with contextlib.suppress(DataConnectionError), _failures():
            del self._nixl
        self._areas.clear()
        self._made.clear()

    @contextlib.contextmanager
    def peer(self, metadata: bytes) -> Iterator[str]:
        """Register a peer by its metadata, and yield the peer's local name. The peer is removed when its last user
        leaves. Raises DataConnectionError if NIXL refuses the metadata."""
        with self._lock, _failures():
            name = self._nixl.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._peers[name] = self._peers.get(name, 0) + 1
        try:
            yield name
        finally:
            with self._lock, contextlib.suppress(DataConnectionError), _failures():
                self._peers[name] -= 1
                if not self._peers[name]:
                    del self._peers[name]
                    self._nixl.remove_remote_agent(name)

    @contextlib.contextmanager
    def read(self, peer: str, addresses: Sequence[int]) -> Iterator[list[NDArray[np.uint8]]]:
        """Read the peer's pages at these addresses in one request, and yield their copies, in the same order. The
        copies lie in reused memory areas and are good inside the context alone. Raises DataConnectionError if the read
        fails or takes longer than READ_S."""
        with self._lock, _failures():
            areas = [self._areas.pop() if self._areas else self._new_area() for _ in addresses]
        self._read(peer, addresses, areas)
        try:
            yield areas
        finally:
            with self._lock:
                self._areas += areas

    def _read(self, peer: str, addresses: Sequence[int], areas: Sequence[NDArray[np.uint8]]) -> None:
        """Read one page from each address into the area at the same place, and wait for READ_S at most. Raises
        DataConnectionError if that fails; then the areas must not be used again, since NIXL may still write to them."""
        deadline = time.monotonic() + READ_S
        size = self._page_bytes
        with self._lock, _failures():
            ours = self._nixl.get_xfer_descs([(area.ctypes.data, size, 0) for area in areas], _MEMORY)
            theirs = self._nixl.get_xfer_descs([(address, size, 0) for address in addresses], _MEMORY)
            request = self._nixl.initialize_xfer("READ", ours, theirs, peer)
            state = self._nixl.transfer(request)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            with self._lock, _failures():
                state = self._nixl.check_xfer_state(request)
        with self._lock, _failures():
            request.release()
        if state != "DONE":
            raise DataConnectionError("nixl", f"a read ended as {state}")

    def _new_area(self) -> NDArray[np.uint8]:
        """Allocate memory for one page, and register it with NIXL, which may write to it; `metadata` does not name it.
        It is kept until `close`. The caller holds the lock."""
        memory = mmap.mmap(-1, self._page_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        area: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._nixl.register_memory([(area.ctypes.data, len(area), 0, "")], _MEMORY)
        self._made.append(area)
        return area


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Inside, every exception becomes a DataConnectionError, since NIXL's errors have no class in common."""
    try:
        yield
    except Exception as error:
        raise DataConnectionError("nixl", f"{type(error).__name__}: {error}") from error
