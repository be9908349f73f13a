"""The gRPC wiring of the kvstore: its servicer, its sweeper thread, its start, drain and close."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from typing import TYPE_CHECKING

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from quire_common.config import split_address
from quire_common.kv.page_mac import PageMac
from quire_common.telemetry.logs import get_logger
from quire_kvstore.data.data_port import DataPort
from quire_kvstore.page_store import PageStore
from quire_kvstore.servicer import DataEndpoints, KvStoreServicer
from quire_kvstore.store_metrics import StoreMetrics
from quire_kvstore.stream_limiter import StreamLimiter
from quire_kvstore.tiers.make_tiers import make_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from quire_kvstore.config import KvstoreConfig

log = get_logger(__name__)
_POPULATE_BYTES = 16 << 20
_THREADS_FOR_SHORT_CALLS = 8
# A thread that comes back from the disk or a socket waits no longer for one that computes.
SWITCH_INTERVAL_S = 0.0005


def worker_threads(config: KvstoreConfig) -> int:
    """Each stream holds a thread, and so does a lookup that waits; what is left answers the short calls, health too."""
    return config.max_transfers + config.max_watchers + config.max_prefetches + _THREADS_FOR_SHORT_CALLS


class KvstoreService:
    """Implements SyncService. The data port listens from construction on; the tiers are opened by `start`. Raises
    ConfigError for options that cannot be used, and for a data port that is taken."""

    name = "kvstore"

    def __init__(self, config: KvstoreConfig) -> None:
        mac = PageMac.from_config(config.page_mac_key, config.page_mac_key_file)
        self.store = PageStore(config, tiers=make_tiers(config, mac), mac=mac)
        self._config = config
        self._stream_limiter = StreamLimiter(config.max_transfers, config.transfer_timeout_s)
        self._data = DataPort(config, split_address(config.listen, "--listen")[0], self.store)
        self._metrics = StoreMetrics()
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="sweeper", daemon=True)

    def register(self, server: grpc.Server) -> Sequence[str]:
        """Add the KvStore servicer to the gRPC server, with a new random epoch. Returns the full name of the
        service."""
        epoch = common_pb2.Epoch(boot_id=secrets.randbits(64), run=1)
        endpoints = DataEndpoints(self._data.arena, self._data.port)
        servicer = KvStoreServicer(self.store, self._stream_limiter, epoch, endpoints, self._config.prefetch_ms / 1000)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server)
        return [kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name]

    def start(self) -> None:
        """Open the tiers, make the RAM resident if so configured, then start the data port and the sweeper thread. Also
        shortens the interpreter's thread switch interval. The gRPC server is not started here."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.store.start()
        self._populate()
        self._data.start()
        self._sweeper.start()
        log.info("pages travel", data_port=self._data.port, arena=self._data.arena)

    def drain(self, timeout_s: float) -> None:
        """From now on, answer every lookup with a miss, want no pages for puts, and end Watch streams. Wait up to
        `timeout_s` in all until Put and Get streams have ended, no data connection works on a request, and queued pages
        are written to lower tiers or dropped. Leases are not waited for."""
        deadline = time.monotonic() + timeout_s
        self.store.drain()
        self._stream_limiter.drain(timeout_s)
        self._data.drain(max(deadline - time.monotonic(), 0.0))
        self.store.flush(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Stop the sweeper, end data connections, close the tiers and give the memory back. The memory stays if a tier
        or the writer of a page hangs (see PageStore.close)."""
        self._stopping.set()
        if self._sweeper.is_alive():
            self._sweeper.join()
        self._data.close()
        self.store.close()

    def _populate(self) -> None:
        """If so configured, make all of the RAM resident, 16 MiB at a time, since the interpreter waits for each part.
        Ends early if the service stops or the kernel refuses."""
        started, start = time.monotonic(), 0
        while self._config.ram_populate and not self._stopping.is_set():
            if not self.store.populate(start, _POPULATE_BYTES):
                log.info("memory is taken", bytes=start, seconds=round(time.monotonic() - started, 3))
                return
            start += _POPULATE_BYTES

    def _sweep(self) -> None:
        """Until `close`, every `sweep_s`: end expired leases, cancel Put and Get streams whose time is over, and update
        the metrics. An exception is logged and ends the round, and the thread goes on."""
        while not self._stopping.wait(self._config.sweep_s):
            try:
                self.store.sweep()
                self._stream_limiter.sweep()
                self._metrics.update(self.store.stats())
            except Exception:
                log.exception("a sweep failed")
