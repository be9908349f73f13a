"""`/openapi.json`, and `/docs`: a page that fetches only this document, from the same origin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from quire_router.front.http.openapi.document import openapi_document

if TYPE_CHECKING:
    from starlette.requests import Request

DOCUMENT_PATH, PAGE_PATH = "/openapi.json", "/docs"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class DocsRoutes:
    """Endpoints for GET, made once."""

    def __init__(self, open_paths: frozenset[str], paths: frozenset[str]) -> None:
        self._document = orjson.dumps(openapi_document(open_paths, paths | {DOCUMENT_PATH, PAGE_PATH}))
        self._page = (Path(__file__).parent / "page.html").read_bytes()

    async def document(self, _request: Request) -> Response:
        """Answer with the OpenAPI document."""
        return Response(self._document, media_type="application/json")

    async def page(self, _request: Request) -> Response:
        """Answer with the page that shows the document."""
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(self._page, media_type="text/html", headers=headers)
