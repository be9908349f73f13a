"""`python -m quire_worker.profile --model FOLDER`: prints the table, and says where trace and records are."""

from __future__ import annotations

import sys

from quire_common.errors import QuireError
from quire_common.serving.server import service_main
from quire_worker.profile.profile_config import ProfileConfig

_EXIT_FAILED = 2


def main() -> int:
    """Run the profile. Returns the exit code."""
    return service_main("worker", ProfileConfig, _run)


def _run(config: ProfileConfig) -> int:
    """Profile a step, print the table, and say where the files are. A QuireError, such as one of the configuration, the
    model or a step that hangs, is printed with its fix to stderr. Returns the exit code: 0, or 2 after such an error;
    other errors are raised."""
    # Here and not above: torch takes seconds to import, and `--help` needs none of it.
    from quire_worker.profile.kernel_table import as_text
    from quire_worker.profile.step_profile import profile_step

    try:
        found = profile_step(config)
    except QuireError as error:
        print(f"error: {error.message} [{error.code}]\nfix: {error.fix}", file=sys.stderr)
        return _EXIT_FAILED
    print(f"{config.name} on {found.device}: {config.batch} sequences of {config.context} tokens", end="")
    print(f", a prompt of {config.prompt}" if config.prompt else "")
    print(as_text(found.rows))
    print(f"trace: {found.trace} (chrome://tracing, ui.perfetto.dev)\nrecords: {found.kernels}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
