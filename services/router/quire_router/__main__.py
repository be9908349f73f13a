"""`python -m quire_router`."""

from __future__ import annotations

import sys

from quire_common.serving.server import run_aio, service_main
from quire_router.config import RouterConfig, public_tls
from quire_router.front.grpc.grpc_limits import grpc_limits
from quire_router.server import RouterService


def main() -> int:
    """Load the configuration and run the router until a signal ends it. Returns the exit code."""
    return service_main(
        "router",
        RouterConfig,
        lambda config: run_aio(
            config,
            lambda bound: RouterService(config, bound),
            metrics_port=False,
            limits=grpc_limits(config),
            public_tls=public_tls(config),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
