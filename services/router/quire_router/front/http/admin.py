"""The port for metrics and administration, apart from the public port. If the router has keys, /metrics needs one with
the scope `metrics`, and every other path but the probes one with the scope `admin`.

Operators pause and drain this router process here. Administrative paths of vLLM that need an engine are refused by
name. The port opens only if `--metrics-listen` names an address. Without keys, only programs of the same machine may
change anything, and web pages may not. Like the metrics ports of other services, the port serves at most
MAX_CONNECTIONS connections at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router

from quire_common.config import split_address
from quire_common.errors import Unsupported
from quire_common.telemetry.metrics_server import MAX_CONNECTIONS
from quire_router.front.http.admin_guard import check_administrator
from quire_router.front.http.edge import METRICS_PATH, Edge
from quire_router.front.http.server import HttpServer
from quire_router.principal import ADMIN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from quire_router.api_keys import ApiKeys
    from quire_router.config import RouterConfig
    from quire_router.front.http.status import StatusRoutes
    from quire_router.limits.rate_limits import RateLimits
    from quire_router.requests.admission import Admission

_MAX_BODY_BYTES = 64 * 1024
# vLLM's, for engines: this router has no way to ask its engines for them.
_NOT_SERVED = ("/reset_prefix_cache", "/sleep", "/wake_up", "/start_profile", "/stop_profile")


class AdminPort:
    """The port is open from `start` to `close`. Without a configured address, both do nothing."""

    def __init__(
        self,
        config: RouterConfig,
        keys: ApiKeys,
        rates: RateLimits,
        admission: Admission,
        status: StatusRoutes,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when the router's readiness may have changed. Binds the port, if one is configured;
        raises ConfigError if that fails."""
        self._admission = admission
        self._drain_timeout_s = config.drain_timeout_s
        self._changed = changed
        self.routes = Router(
            [
                Route(METRICS_PATH, status.metrics),
                Route("/livez", status.livez),
                Route("/readyz", status.readyz),
                Route("/health", status.health),
                Route("/pause", _guarded(self.pause, keys), methods=["POST"]),
                Route("/resume", _guarded(self.resume, keys), methods=["POST"]),
                Route("/drain", _guarded(self.drain, keys), methods=["POST"]),
                Route("/is_sleeping", self.is_sleeping),
                *(Route(path, _not_served, methods=["POST"]) for path in _NOT_SERVED),
            ],
            redirect_slashes=False,
            default=_not_found,
        )
        self.http: HttpServer | None = None
        if config.metrics_listen:
            host, port = split_address(config.metrics_listen, "metrics_listen")
            edge = Edge(self.routes, keys, rates, _MAX_BODY_BYTES, ADMIN)
            self.http = HttpServer(
                edge,
                host,
                port,
                config.ssl_certfile,
                config.ssl_keyfile,
                flag="metrics-listen",
                max_connections=MAX_CONNECTIONS,
            )

    async def start(self) -> None:
        """Open the port, if one is configured; return when it accepts connections."""
        if self.http is not None:
            await self.http.start()

    async def close(self) -> None:
        """Close the port. Idempotent."""
        if self.http is not None:
            await self.http.close()

    async def pause(self, _request: Request) -> Response:
        """Stop admitting requests. Running requests go on."""
        self._admission.pause()
        return self._state()

    async def resume(self, _request: Request) -> Response:
        """Admit requests again, after a pause or a drain."""
        self._admission.resume()
        return self._state()

    async def drain(self, _request: Request) -> Response:
        """Stop admitting requests until `resume`, and report that readiness changed. The answer comes when no request
        runs any more, or after `--drain-timeout-s` (0: at once), and says how many sequences are still in flight."""
        self._admission.pause()
        self._changed()
        await self._admission.close(self._drain_timeout_s)
        return self._state()

    async def is_sleeping(self, _request: Request) -> Response:
        """Answer false, because Quire's engines never sleep."""
        return _json({"is_sleeping": False})

    def _state(self) -> Response:
        """Report that readiness may have changed. The answer says whether admission is paused, and how many sequences
        are in flight."""
        self._changed()
        return _json({"paused": not self._admission.open, "in_flight": self._admission.inside})


def _guarded(
    endpoint: Callable[[Request], Awaitable[Response]], keys: ApiKeys
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint with a guard before it, which raises PermissionDenied as `check_administrator` does."""

    async def guarded(request: Request) -> Response:
        check_administrator(request, keys)
        return await endpoint(request)

    return guarded


async def _not_served(request: Request) -> Response:
    """Raise Unsupported with ADMIN_UNSUPPORTED, for the paths of vLLM that this router does not serve."""
    raise Unsupported(
        "ADMIN_UNSUPPORTED", f"This router does not serve {request.url.path}.", "Restart the engine instead."
    )


async def _not_found(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise HTTPException(404)


def _json(body: dict[str, bool | int]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
