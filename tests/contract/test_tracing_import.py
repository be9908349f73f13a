from __future__ import annotations

import subprocess
import sys


def test_without_an_endpoint_the_sdk_is_not_even_imported() -> None:
    script = (
        "import sys; from quire_common.telemetry import tracing, interceptors; tracing.setup_tracing('x', 'x-1', '');"
        "sys.exit(any(m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
