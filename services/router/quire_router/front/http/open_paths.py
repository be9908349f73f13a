"""What needs no key: liveness, readiness, and the static pages. Everything else does, unknown paths included."""

from __future__ import annotations

LIVE_PATHS = ("/livez", "/health/liveness")
READY_PATHS = ("/readyz", "/ready", "/health/readiness")
OPEN_PATHS = frozenset({*LIVE_PATHS, *READY_PATHS, "/health", "/ping", "/docs", "/openapi.json"})
