"""/v1/responses: create, get, cancel and delete. A response can continue an earlier one by its id."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from quire_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_router.front.http.exchange import exchange_of, send_json
from quire_router.front.http.parsing.prompts import joined_lists
from quire_router.front.http.responses.document import ResponseDocument
from quire_router.front.http.responses.format import ResponsesFormat
from quire_router.front.http.responses.kept_response import pack_response, unpack_response
from quire_router.front.http.responses.store import StoreOutcome
from quire_router.front.parameters.fields import json_text

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from quire_router.front.http.exchange import Exchange
    from quire_router.front.http.generate import Serving
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.front.http.responses.background import BackgroundRuns
    from quire_router.front.http.responses.parse import AskedResponse
    from quire_router.requests.generation import Generation

log = get_logger(__name__)
# What this router gives out; beside them the store has its own names.
_ID = re.compile("resp_[0-9a-f]{32}")
_MAX_ID = 128
_KEEPING = "run the router with --responses-max-mib above 0, and with --redis where --http-workers is above 1"


class ResponseRoutes:
    """An ASGI application for POST, and endpoints for paths with a response id. Without a store, responses are not
    stored."""

    def __init__(self, serving: Serving, background: BackgroundRuns | None) -> None:
        self._serving = serving
        self._background = background
        self._store = background.store if background is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create a response: run it and send its answer, or start it in the background. With `previous_response_id`,
        the messages of that stored response come between the instructions and the input. Raises InvalidArgument for
        such an id without a store, the errors of `_load` and `_history` for this id, and those of `Serving.parse`,
        `Serving.run` and `_start_in_background`."""
        exchange = exchange_of(scope)
        asked: AskedResponse = await self._serving.parse("response", scope, receive)
        parsed, history_json = asked.request, "[]"
        if asked.previous is not None:
            if self._store is None:
                raise InvalidArgument(
                    "RESPONSES_NOT_KEPT",
                    "This router keeps no responses, so none can be continued.",
                    f"Send the whole conversation as input, or {_KEEPING}.",
                    param="previous_response_id",
                )
            history = _history(await self._load(exchange.tenant, asked.previous, "previous_response_id"))
            history_json = json_text("previous_response_id", history)
            parsed = asked.with_history(history_json)
        response_id = f"resp_{uuid.uuid4().hex}"

        def make_format(generation: Generation, _parsed: ParsedRequest) -> ResponsesFormat:
            return self._format(exchange, asked, history_json, response_id, generation)[1]

        if asked.background:
            await self._start_in_background(exchange, asked, history_json, response_id, parsed, send)
        else:
            await self._serving.run(scope, receive, send, parsed, make_format)

    async def get(self, request: Request) -> Response:
        """Answer with the present object of a stored or running response. Raises NotFound for an id without one,
        Unavailable if the store does not answer and the response does not run in this process, and InvalidArgument for
        a request to stream it."""
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise InvalidArgument(
                "PARAMETER_UNSUPPORTED", "A kept response cannot be streamed.", "Leave stream out.", param="stream"
            )
        return _json((await self._kept(request))["response"])

    async def cancel(self, request: Request) -> Response:
        """Cancel a response that runs in the background, here or at another router, and answer with its object, then
        cancelled. A response that has ended stays as it is. Raises NotFound for an id without a response,
        InvalidArgument for a response that is not in the background, and Unavailable if the store does not answer; a
        response that runs in this process is cancelled without the store."""
        tenant, response_id = exchange_of(request.scope).tenant, request.path_params["response_id"]
        running = self._background.running(tenant, response_id) if self._background is not None else None
        if self._background is not None and running is not None:
            await self._background.cancel(tenant, response_id)  # it runs here, so the store is not needed
            return _json({**running, "status": "cancelled"})
        kept = (await self._kept(request))["response"]
        if not kept["background"] or self._background is None:
            raise InvalidArgument(
                "NOT_IN_BACKGROUND",
                "Only a response in the background can be cancelled.",
                "Close the connection of any other.",
                param="response_id",
            )
        if kept["status"] == "in_progress":
            await self._background.cancel(tenant, kept["id"])
            kept = (await self._kept(request))["response"]  # it may have ended before it was told
            if kept["status"] == "in_progress":
                kept["status"] = "cancelled"
        return _json(kept)

    async def delete(self, request: Request) -> Response:
        """Delete a stored response of the tenant, and answer that it is deleted. One that was started in the background
        is cancelled first, as `BackgroundRuns.cancel` with `forget` does, even if it has ended. Raises NotFound for an
        id without a response, and Unavailable if the store does not answer; the response may then be cancelled all the
        same, and is deleted at its end."""
        kept = (await self._kept(request))["response"]
        tenant = exchange_of(request.scope).tenant
        if kept["background"] and self._background is not None:
            await self._background.cancel(tenant, kept["id"], forget=True)
        if self._store is not None:
            await self._store.delete(tenant, kept["id"])
        return _json({"id": kept["id"], "object": "response", "deleted": True})

    async def _start_in_background(
        self,
        exchange: Exchange,
        asked: AskedResponse,
        history_json: str,
        response_id: str,
        parsed: ParsedRequest,
        send: Send,
    ) -> None:
        """Start a response in the background, let other routers see it if the store takes it now (see
        `BackgroundRuns.show`), and answer at once with its running object. Raises InvalidArgument if it would not be
        stored, the errors of starting its generation, and TooLarge if its running object is too large to be stored; the
        generation is then closed. Releases the memory of the body once the prompts are tokenized. `history_json` has
        the messages of previous responses."""
        if self._background is None or not asked.store:
            raise InvalidArgument(
                "BACKGROUND_NEEDS_STORE",
                "A response in the background must be kept, and this one would not be.",
                f"Leave store out, and {_KEEPING}.",
                param="background",
            )
        caller = self._serving.caller(exchange, parsed)
        generation = await self._serving.pipeline.generate(parsed.job, caller, exchange.arrived_ns)
        exchange.release_body()
        try:
            document, answer = self._format(exchange, asked, history_json, response_id, generation)
            running = self._background.start(exchange.tenant, generation, document, answer)
        except BaseException:
            generation.close()
            raise
        await self._background.show(exchange.tenant, running)
        await send_json(send, orjson.dumps(running))

    def _format(
        self,
        exchange: Exchange,
        asked: AskedResponse,
        history_json: str,
        response_id: str,
        generation: Generation,
    ) -> tuple[ResponseDocument, ResponsesFormat]:
        """Make the response object and the format that writes it. At the end, the format keeps the response and its
        conversation, unless there is no store or the client said `store: false`."""
        store = self._store if asked.store else None
        document = ResponseDocument(
            response_id,
            asked.echoed,
            generation.served.name,
            generation.created,
            background=asked.background,
            store=store is not None,
        )

        async def keep(ended: dict[str, Any], message: dict[str, Any]) -> StoreOutcome:
            """Store the ended response with its conversation, to which `message` is added; return the outcome. KEPT
            without storing, if the response is not to be stored."""
            if store is None:
                return StoreOutcome.KEPT  # as the client wants it
            conversation = joined_lists(history_json, asked.messages_json, json_text("messages", [message]))
            value = pack_response(ended, conversation)
            return await store.put(exchange.tenant, response_id, value, wait=asked.background)

        return document, ResponsesFormat(generation, document, keep)

    async def _kept(self, request: Request) -> dict[str, Any]:
        """Load the response that the request's path names; see `_load`. Raises NotFound if there is none or it is
        unreadable, and Unavailable if the store does not answer and the response does not run here."""
        return await self._load(exchange_of(request.scope).tenant, request.path_params["response_id"], "response_id")

    async def _load(self, tenant: str, response_id: str, param: str) -> dict[str, Any]:
        """Return a tenant's response as its object (`response`) and its messages: the stored one, else the one that
        runs in this process. A running one has no messages yet. Raises NotFound, which names `param`, if there is
        neither or the stored value is unreadable, which is logged. Raises Unavailable if the store does not answer and
        the response does not run here."""
        value, running = None, None
        if self._background is not None and _ID.fullmatch(response_id):
            try:
                value = await self._background.store.get(tenant, response_id)
            except Unavailable:
                running = self._background.running(tenant, response_id)
                if running is None:
                    raise
            else:
                running = await self._background.look_up(tenant, response_id) if value is None else None
        if running is not None:
            return {"response": running, "messages": []}
        found = unpack_response(value) if value is not None else None
        if value is not None and found is None:
            log.warning("a kept response is unreadable", response=response_id)
        if found is None:
            raise NotFound(
                "RESPONSE_NOT_FOUND",
                f"There is no response `{response_id[:_MAX_ID]}`, or it is not kept any more.",
                "Ask for one that is kept, or send the whole conversation as input.",
                param=param,
            )
        return found


def _history(kept: dict[str, Any]) -> list[Any]:
    """Return the conversation of a stored response, to continue it. Raises FailedPrecondition unless the response is
    completed or incomplete."""
    status = kept["response"]["status"]
    if status not in ("completed", "incomplete"):
        raise FailedPrecondition(
            "RESPONSE_NOT_ENDED",
            f"The previous response is {status}.",
            "Continue from a response that is completed.",
            param="previous_response_id",
        )
    found: list[Any] = kept["messages"]
    return found


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
