"""`python -m quire_kvstore`: flags to config, then the service's whole life."""

from __future__ import annotations

import sys

from quire_common.serving.server import run_sync, service_main
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.server import KvstoreService, worker_threads


def main() -> int:
    """Run the service until it ends. Returns the process's exit code."""
    return service_main(
        "kvstore",
        KvstoreConfig,
        lambda config: run_sync(config, lambda _: KvstoreService(config), worker_threads(config)),
    )


if __name__ == "__main__":
    sys.exit(main())
