"""Registers a service with discovery when it is ready, and withdraws it when it leaves. Only for discovery by a
registry."""

from __future__ import annotations

import asyncio
import threading

from quire_common.config import ServiceConfig, split_address
from quire_common.discovery.endpoint import Discovery, Endpoint
from quire_common.discovery.factory import make_discovery
from quire_common.errors import ConfigError

# Ways of discovery that need no registration.
PASSIVE = ("static", "dns")
_ANY_HOST = ("0.0.0.0", "::")
_CLOSE_LIMIT_S = 10.0
_CANCEL_LIMIT_S = 1.0


async def announce(config: ServiceConfig, service: str, instance: str, address: str) -> Discovery | None:
    """Register the service under `--advertise`, or else `address`, and return the Discovery; closing it withdraws the
    registration. Returns None if discovery needs no registration (static, dns); the address is then not checked.
    Otherwise raises ConfigError for a bad address, one that means every address of the host, or a bad `--discovery`. A
    registry that is away is not an error: the registration is tried again."""
    if config.discovery in PASSIVE:
        return None
    advertised = config.advertise or address
    if split_address(advertised, "--advertise")[0] in _ANY_HOST:
        raise ConfigError(
            "ADVERTISE_MISSING",
            f"Peers cannot dial {advertised}, which means every address of this host.",
            "Give --advertise host:port.",
            param="advertise",
        )
    discovery = make_discovery(config.discovery, {}, config.discovery_file)
    await discovery.register(Endpoint(instance, service, advertised))
    return discovery


class ThreadAnnouncement:
    """Registers a service that has no event loop. A thread keeps the registration alive until `close`; if discovery
    needs no registration, there is no thread. Raises ConfigError as `announce` does."""

    def __init__(self, config: ServiceConfig, service: str, instance: str, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._discovery = self._loop.run_until_complete(announce(config, service, instance, address))
        except BaseException:
            self._loop.close()
            raise
        self._thread: threading.Thread | None = None
        if self._discovery is not None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="announcement", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Withdraw the registration, if there is one, and end the thread. Waits; raises TimeoutError if the withdrawal
        takes more than 10 s. The withdrawal is then cancelled. Must be called only once."""
        try:
            if self._discovery is not None and self._thread is not None:
                closing = asyncio.run_coroutine_threadsafe(self._discovery.close(), self._loop)
                try:
                    closing.result(_CLOSE_LIMIT_S)
                finally:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._thread.join()
                    self._cancel_tasks()
        finally:
            self._loop.close()

    def _cancel_tasks(self) -> None:
        """Cancel the tasks that are left in the loop, which no longer runs in the thread, and wait briefly for their
        ends."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_LIMIT_S))
