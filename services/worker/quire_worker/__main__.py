"""`python -m quire_worker --model FOLDER`: flags to config, then the service's whole life."""

from __future__ import annotations

import os
import sys

from quire_common.serving.server import run_sync, service_main
from quire_worker.config import WorkerConfig
from quire_worker.paced.service import PacedService
from quire_worker.server import WorkerService
from quire_worker.threads.waiting import limit_spinning


def main() -> int:
    """Run the service to its end; returns the process's exit code."""
    return service_main("worker", WorkerConfig, _run)


def _run(config: WorkerConfig) -> int:
    """Limit the spinning of threads, and run the worker service, or the paced one if --paced is given, until it ends.
    Returns the exit code."""
    limit_spinning(os.environ)
    service = WorkerService if config.paced is None else PacedService
    return run_sync(config, lambda bound: service(config, bound))


if __name__ == "__main__":
    sys.exit(main())
