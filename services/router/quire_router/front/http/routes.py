"""The table of HTTP routes. If keys are set, every path except the edge's OPEN_PATHS needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from quire_router.front.http.formats.chat_format import ChatFormat
from quire_router.front.http.formats.completion_format import CompletionFormat
from quire_router.front.http.formats.messages_format import MessagesFormat
from quire_router.front.http.formats.token_format import TokenFormat
from quire_router.front.http.generate import GenerateEndpoint, Invocations, Serving
from quire_router.front.http.open_paths import LIVE_PATHS, OPEN_PATHS, READY_PATHS
from quire_router.front.http.openapi.page import DOCUMENT_PATH, PAGE_PATH, DocsRoutes
from quire_router.front.http.responses.endpoint import ResponseRoutes
from quire_router.front.http.text_routes import TextRoutes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from quire_router.config import RouterConfig
    from quire_router.front.http.bodies.body_parser import BodyParser
    from quire_router.front.http.responses.background import BackgroundRuns
    from quire_router.front.http.status import StatusRoutes
    from quire_router.requests.beam_search import BeamSearch
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.pipeline import Pipeline
    from quire_router.text.token_bytes import TokenBytes
    from quire_router.text.tokenizer_client import TokenizerClient


def make_routes(
    config: RouterConfig,
    pipeline: Pipeline,
    beams: BeamSearch,
    bodies: BodyParser,
    catalog: Catalog,
    tokenizer: TokenizerClient,
    token_bytes: TokenBytes,
    status: StatusRoutes,
    background: BackgroundRuns | None,
    *,
    with_metrics: bool,
    console: Sequence[Route] = (),
) -> Router:
    """Make the ASGI application of all routes, with the console's. `with_metrics`: with /metrics too. Without
    `background`, responses are not stored. The application raises HTTPException for unknown paths and methods."""
    serving = Serving(pipeline, beams, bodies, config)
    completions = GenerateEndpoint(serving, "completion", CompletionFormat)
    chat = GenerateEndpoint(serving, "chat", ChatFormat)
    tokens = GenerateEndpoint(serving, "tokens", TokenFormat)
    messages = GenerateEndpoint(serving, "messages", MessagesFormat)
    responses = ResponseRoutes(serving, background)
    text = TextRoutes(serving, catalog, tokenizer, token_bytes)
    routes = [
        Route("/v1/completions", completions, methods=["POST"], name="completions"),
        Route("/v1/chat/completions", chat, methods=["POST"], name="chat"),
        Route("/inference/v1/generate", tokens, methods=["POST"], name="tokens"),
        Route("/invocations", Invocations(serving, ChatFormat, CompletionFormat), methods=["POST"], name="invocations"),
        Route("/v1/responses", responses, methods=["POST"], name="responses"),
        Route("/v1/responses/{response_id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"], name="messages"),
        Route("/v1/messages/count_tokens", text.count_tokens, methods=["POST"]),
        Route("/tokenize", text.tokenize, methods=["POST"]),
        Route("/detokenize", text.detokenize, methods=["POST"]),
        Route("/v1/completions/render", text.render_completion, methods=["POST"]),
        Route("/v1/chat/completions/render", text.render_chat, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/{model:path}", status.model),
        Route("/version", status.version),
        Route("/load", status.load),
        *(Route(path, status.livez) for path in LIVE_PATHS),
        *(Route(path, status.readyz) for path in READY_PATHS),
        Route("/health", status.health),
        Route("/ping", status.health, methods=["GET", "POST"], name="ping"),
    ]
    routes += console
    if with_metrics:
        routes.append(Route("/metrics", status.metrics))
    docs = DocsRoutes(OPEN_PATHS, frozenset(route.path.replace(":path}", "}") for route in routes))
    routes += [Route(DOCUMENT_PATH, docs.document), Route(PAGE_PATH, docs.page)]
    return Router(routes, redirect_slashes=False, default=_not_found)


async def _not_found(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise HTTPException(404)
