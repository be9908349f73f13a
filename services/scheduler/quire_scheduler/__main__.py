"""`python -m quire_scheduler --worker HOST:PORT`: flags to config, then the service's whole life."""

from __future__ import annotations

import sys

from quire_common.serving.server import run_aio, service_main
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.server import SchedulerService


def main() -> int:
    """Read the flags and run the scheduler service until it ends. Returns the process's exit code."""
    return service_main(
        "scheduler",
        SchedulerConfig,
        lambda config: run_aio(config, lambda bound: SchedulerService(config, bound)),
    )


if __name__ == "__main__":
    sys.exit(main())
