"""The paths that need no key: liveness, readiness, and the static pages. All other paths need one, unknown paths
included."""

from __future__ import annotations

LIVE_PATHS = ("/livez", "/health/liveness")
READY_PATHS = ("/readyz", "/ready", "/health/readiness")
# The console's page and the files that it loads. The data of the page needs a key.
CONSOLE_FILES = {
    "/console": "index.html",
    "/console/console.css": "console.css",
    "/console/icon.svg": "icon.svg",
    **{
        f"/console/{name}.js": f"{name}.js"
        for name in ("console", "dom", "fleet", "kv", "live_stream", "playground", "requests")
    },
}
OPEN_PATHS = frozenset({*LIVE_PATHS, *READY_PATHS, "/health", "/ping", "/docs", "/openapi.json", *CONSOLE_FILES})
