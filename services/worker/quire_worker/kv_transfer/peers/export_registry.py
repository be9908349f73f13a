"""ExportRegistry: the leases whose pages peers may pull. It reports their progress to the engine. It knows nothing of
sockets."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError
from quire_common.kv_data.lease_key import KEY_BYTES, NO_KEY
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.job_queue import ended_frame, trace_move
from quire_worker.kv_transfer.peers.export import Export, export_ended
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.job_queue import Job
    from quire_worker.kv_transfer.peers.export import Holder

log = get_logger(__name__)
# Number of ended leases whose keys are kept, so that a late peer gets an authentic refusal.
_REMEMBERED = 1024
# Pages of one export that lie in the ring at once: a share of it, so that slow peers hold up no others.
_SHARE = 4
_MAX_WINDOW = 8
# A frame that the engine has sent arrives sooner.
CANCELLATION_TIMEOUT_S = 1.0
# The engine sends a frame at least twice a second.
ENGINE_SILENT_S = 2.0


class ExportRegistry:
    """A StoreHandler. Sessions' threads call `find_export`, `finish_export` and the methods after them. `window`: how
    many pages of one export may lie in the ring at once; `several`: half of it, rounded up."""

    def __init__(self, context: AgentContext) -> None:
        self._send = context.send
        self._silence_s = context.silence_s
        self._namespace = bytes.fromhex(context.setup.namespace)
        self.window = max(1, min(_MAX_WINDOW, len(context.setup.store_slots) // _SHARE))
        # Frames wake the engine, so they name so many pages at once if this delays no page.
        self.several = (self.window + 1) // 2
        self._lock = threading.Lock()
        self._ring = context.ring
        self._cancellations_seen = 0
        self._seen_changed = threading.Condition()
        self._exports: dict[int, Export] = {}
        self._by_handle: dict[bytes, Export] = {}
        self._ended: OrderedDict[bytes, bytes] = OrderedDict()

    def start_job(self, job: Job) -> None:
        """Register the export under its lease key, so that peers find it. If it has no valid key, or another export has
        the same key, that is logged, and the export ends at once, without pages."""
        key = job.move.lease_key
        if len(key) == KEY_BYTES and key != NO_KEY:
            export = Export(job, self._namespace)
            with self._lock:
                if self._by_handle.setdefault(export.handle, export) is export:
                    self._exports[job.number] = export
                    return
        log.warning("an export has no lease key of its own")
        self._send(ended_frame(job, 0, ""))

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Pass pages that are in the ring to their export; slots that it does not want go back to the engine."""
        with self._lock:
            export = self._exports.get(number)
        self.release([slot for _, slot in pairs] if export is None else export.fill(pairs))

    def offered(self, number: int, pages: int) -> None:
        """Tell the export of job `number`, if it is here, that its first `pages` pages are filled."""
        with self._lock:
            export = self._exports.get(number)
        if export is not None:
            export.offer(pages)

    def cancel_before(self, generation: int) -> None:
        """End all exports of earlier generations, which peers find no more, and count the cancellation. The engine gets
        their slots, but no ENDED."""
        with self._lock:
            void = [export for export in self._exports.values() if export.job.generation < generation]
        for export in void:
            self._end(export)
        self._count_cancellation()

    def cancel_job(self, number: int) -> None:
        """End the export of job `number`, if it is here, and count the cancellation in any case. The engine gets its
        slots, but no ENDED."""
        with self._lock:
            export = self._exports.get(number)
        if export is not None:
            self._end(export)
        self._count_cancellation()

    def close(self) -> None:
        """Does nothing: the process ends, and its sessions with it."""

    def find_export(self, handle: bytes) -> tuple[bytes, Export | None] | None:
        """Return the key of the lease with this handle, and its export (None: it has ended). Returns None if the lease
        is unknown, or not among the last 1024 that ended. First waits for cancellations that the engine has counted and
        this process has not read yet, since the pages of these exports may be filled with other content. Raises
        DataConnectionError if they do not come in CANCELLATION_TIMEOUT_S."""
        with self._seen_changed:
            if not self._seen_changed.wait_for(
                lambda: self._cancellations_seen >= self._ring.cancellations, CANCELLATION_TIMEOUT_S
            ):
                raise DataConnectionError("stale", "the engine has ended exports, and this process does not hear which")
        with self._lock:
            export = self._by_handle.get(handle)
            if export is not None:
                return export.key, export
            key = self._ended.get(handle)
            return None if key is None else (key, None)

    def engine_is_silent(self) -> bool:
        """Whether the engine has sent nothing for some time, since the worker hangs or was stopped. A session that
        waits for a page then refuses its peer."""
        return self._silence_s() > ENGINE_SILENT_S

    def take_over(self, export: Export, holder: Holder) -> None:
        """Make `holder` the session that serves the export, and stop the session before it; slots that nobody wants go
        back to the engine. Raises NotFound if the export is over."""
        self.release(export.take_over(holder))

    def request_pages(self, export: Export, holder: Holder, indices: Sequence[int], most: int) -> None:
        """Ask the engine to put the first `most` of these pages into the ring, each once it is filled. Pages that are
        in the ring, or were requested and have not come, are left out. Nothing is requested for a session that is not
        the holder. If more than `most` pages remain, fewer than `several` new ones are not requested yet, unless the
        first page is one of them."""
        new = export.request_pages(holder, indices[:most], self.several if len(indices) > most else 1)
        if new:
            self._send(Frame.of(AgentFrameKind.WANTED, export.job.generation, export.job.number, new))

    def detach(self, export: Export, holder: Holder) -> None:
        """End the service by `holder`; slots that nobody wants go back to the engine."""
        self.release(export.detach(holder))

    def release(self, slots: Sequence[int]) -> None:
        """Give these slots back to the engine."""
        if slots:
            self._send(Frame.of(AgentFrameKind.RELEASED, 0, 0, slots))

    def finish_export(self, export: Export) -> None:
        """End an export whose peer has all that it wants; raises NotFound if it has ended already. The caller must call
        `report_finished` afterwards."""
        if not self._end(export):
            raise export_ended()

    def report_finished(self, export: Export, transport: str) -> None:
        """Trace a finished export, and tell the engine that `transport` has carried all its pages."""
        pages = len(export.run)
        trace_move(export.job, pages)
        self._send(ended_frame(export.job, pages, transport))

    def _count_cancellation(self) -> None:
        """Count a cancellation of the engine as carried out; `find_export` waits for this count."""
        with self._seen_changed:
            self._cancellations_seen += 1
            self._seen_changed.notify_all()

    def _end(self, export: Export) -> bool:
        """End an export, give its slots back to the engine, and remember its key (of the last 1024) for peers that come
        late. Returns False if the export had ended before."""
        with self._lock:
            if self._exports.pop(export.job.number, None) is None:
                return False
            del self._by_handle[export.handle]
            self._ended[export.handle] = export.key
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        self.release(export.end())
        return True
