"""The table of routes. Every one but the edge's OPEN_PATHS needs a key when keys are set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from quire_router.http.chat_format import ChatFormat
from quire_router.http.completion_format import CompletionFormat
from quire_router.http.generate import GenerateEndpoint
from quire_router.http.parse import parse_chat, parse_completion

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from quire_router.config import RouterConfig
    from quire_router.core.pipeline import Pipeline
    from quire_router.http.status import StatusRoutes


def make_routes(config: RouterConfig, pipeline: Pipeline, status: StatusRoutes, *, with_metrics: bool) -> Router:
    """All routes as an ASGI application; unknown paths and methods raise HTTPException."""
    completions = GenerateEndpoint(pipeline, parse_completion, CompletionFormat, config)
    chat = GenerateEndpoint(pipeline, parse_chat, ChatFormat, config)
    routes = [
        Route("/v1/completions", completions, methods=["POST"], name="completions"),
        Route("/v1/chat/completions", chat, methods=["POST"], name="chat"),
        Route("/v1/models", status.models),
        Route("/version", status.version),
        Route("/load", status.load),
        Route("/livez", status.livez),
        Route("/readyz", status.readyz),
        Route("/health", status.health),
        Route("/ping", status.health, methods=["GET", "POST"], name="ping"),
    ]
    if with_metrics:
        routes.append(Route("/metrics", status.metrics))
    return Router(routes, redirect_slashes=False, default=_not_found)


async def _not_found(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise HTTPException(404)
