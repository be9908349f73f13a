"""The console's page and the files that it loads. They are static, equal for all clients, and contain no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from quire_router.front.http.open_paths import CONSOLE_FILES

if TYPE_CHECKING:
    from starlette.requests import Request

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page may load scripts and styles from this router only, and send requests to it only. With trusted types, no text
# in the page becomes HTML.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # The browser must revalidate each time, so that page and router have the same version.
    "cache-control": "no-cache",
}


class ConsoleFile:
    """Endpoint for GET of one file. The file is read once."""

    def __init__(self, name: str) -> None:
        self._content = (_FOLDER / name).read_bytes()
        self._type = _TYPES[Path(name).suffix]

    async def get(self, _request: Request) -> Response:
        """Answer with the file."""
        return Response(self._content, media_type=self._type, headers=_HEADERS)


def file_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    return [Route(path, ConsoleFile(name).get) for path, name in CONSOLE_FILES.items()]
