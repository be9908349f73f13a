"""The limits of the public gRPC port, from the router's configuration. `front/http/` has the limits of the HTTP
port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.transport import PortLimits

if TYPE_CHECKING:
    from quire_router.config import RouterConfig

# As long as an HTTP client has for its body.
RECEIVE_TIMEOUT_S = 60.0
# Calls of health, of models and of those that are about to be refused, beside one for each sequence in flight.
_MORE_CALLS = 256


def grpc_limits(config: RouterConfig) -> PortLimits:
    """Return the limits of the port at `--listen`: bytes per message, connections, calls at a time, and 60 s for a
    request to arrive. There may be 256 more calls than sequences in flight, for health checks and refusals."""
    return PortLimits(
        message_bytes=config.max_body_bytes,
        calls=config.max_concurrent_requests + _MORE_CALLS,
        connections=config.max_connections,
        receive_timeout_s=RECEIVE_TIMEOUT_S,
    )
