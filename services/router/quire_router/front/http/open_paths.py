"""What needs no key: liveness, readiness, and the static pages. Everything else does, unknown paths included."""

from __future__ import annotations

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/docs", "/openapi.json"})
