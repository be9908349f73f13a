"""Routes that tokenize, detokenize and render requests without generating, with vLLM's names and formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from starlette.responses import Response

from quire_common.sequence import RequestContext
from quire_router.front.http.exchange import exchange_of
from quire_router.front.http.formats.large_json import dumps_in_pieces
from quire_router.front.http.formats.logprob_format import token_text
from quire_router.front.http.parsing.messages_parse import parse_count
from quire_router.front.http.parsing.parse import chat_prompt, parse_chat, parse_completion
from quire_router.front.http.parsing.prompts import many_ids, required, token_prompt
from quire_router.front.http.parsing.sampling_params import sampling_params_of
from quire_router.front.parameters.fields import check_fields
from quire_router.front.parameters.tables import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT
from quire_router.off_loop import MOST_VALUES, off_loop
from quire_router.requests.token_charge import charged
from quire_router.sequences.job import ChatPrompt, TextPrompt

if TYPE_CHECKING:
    from starlette.requests import Request

    from quire_router.front.http.generate import Serving
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.pipeline import Rendering
    from quire_router.text.token_bytes import TokenBytes
    from quire_router.text.tokenizer_client import TokenizerClient


class TextRoutes:
    """Endpoints for POST. They do not check lengths against the context, since an answer need not fit. The tokens count
    against the tenant's limit in the same way as those of a prompt."""

    def __init__(self, serving: Serving, catalog: Catalog, tokenizer: TokenizerClient, token_bytes: TokenBytes) -> None:
        self._serving = serving
        self._catalog = catalog
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids of a text or a conversation and, if asked for, the text of each token. Raises
        QuireError."""
        body = await self._serving.read(request.scope, request.receive)
        context = _context(request)
        if "messages" in body:
            values = check_fields(body, TOKENIZE_CHAT)
            served = self._catalog.resolve(values["model"], exchange_of(request.scope).limits)
            ids = await self._tokenize_chat(chat_prompt(values, body), context)
        else:
            values = check_fields(body, TOKENIZE)
            served = self._catalog.resolve(values["model"], exchange_of(request.scope).limits)
            text = required(values, "prompt")
            with charged(self._serving.pipeline.charge, context.tenant, [TextPrompt(text)]) as settle:
                (ids,), _us = await self._tokenizer.encode(
                    [text], context, add_special_tokens=values["add_special_tokens"], max_tokens=0
                )
                settle([len(ids)])
        # As many as a body has bytes: as an array they take 4 bytes each, and a tenth of the time.
        heavy = len(ids) > MOST_VALUES
        if values["return_token_strs"]:
            await self._token_bytes.ensure(
                (await off_loop(lambda: np.unique(ids), heavy=heavy, tenant=context.tenant)).tolist()
            )

        def written() -> bytes:
            answer: dict[str, Any] = {
                "count": len(ids),
                "max_model_len": served.model.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            if values["return_token_strs"]:
                answer["token_strs"] = [token_text(self._token_bytes.get(token_id)) for token_id in ids.tolist()]
            return dumps_in_pieces(answer)

        return Response(await off_loop(written, heavy=heavy, tenant=context.tenant), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of token ids, special tokens included. Raises QuireError."""
        values = check_fields(await self._serving.read(request.scope, request.receive), DETOKENIZE)
        self._catalog.resolve(values["model"], exchange_of(request.scope).limits)
        tokens = required(values, "tokens")
        tenant = exchange_of(request.scope).tenant
        prompt = await off_loop(lambda: token_prompt(tokens, "tokens"), heavy=many_ids(tokens), tenant=tenant)
        with charged(self._serving.pipeline.charge, tenant, [prompt]):
            text = await self._tokenizer.decode(prompt.ids, skip_special_tokens=False) if len(prompt.ids) else ""
        return _json({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """Answer with the number of tokens in an Anthropic message's input. Raises QuireError."""
        model, prompt = parse_count(await self._serving.read(request.scope, request.receive))
        self._catalog.resolve(model, exchange_of(request.scope).limits)
        return _json({"input_tokens": len(await self._tokenize_chat(prompt, _context(request)))})

    async def render_chat(self, request: Request) -> Response:
        """Answer with the body for /inference/v1/generate that makes the same request of an engine as this chat. Raises
        QuireError."""
        (rendered,) = await self._rendered(request, chat=True)
        return _json(rendered)

    async def render_completion(self, request: Request) -> Response:
        """Answer with such a body for each prompt of a completion. Raises QuireError."""
        return _json(await self._rendered(request, chat=False))

    async def _rendered(self, request: Request, *, chat: bool) -> list[dict[str, Any]]:
        """Tokenize a request's prompts without running it; return a body for /inference/v1/generate for each. Raises
        QuireError."""
        body = await self._serving.read(request.scope, request.receive)
        parse = parse_chat if chat else parse_completion
        parsed = parse(body, self._serving.limits_for(body, request.scope), timings=False)
        exchange = exchange_of(request.scope)
        caller = self._serving.caller(exchange, parsed)
        rendering = await self._serving.pipeline.render(parsed.job, caller, exchange.arrived_ns)
        common = {
            "model": rendering.served.name,
            "features": None,
            "stream": parsed.stream,
            "stream_options": body.get("stream_options"),
            "cache_salt": parsed.job.cache_salt or None,
            "priority": parsed.priority,
            "kv_transfer_params": body.get("kv_transfer_params"),
        }
        limit = {"timeout_s": parsed.timeout_s} if parsed.timeout_s else {}
        return [
            {"request_id": name, "token_ids": ids.tolist(), "sampling_params": {**params, **limit}, **common}
            for name, ids, params in _rendered_prompts(rendering, caller.request_id)
        ]

    async def _tokenize_chat(self, prompt: ChatPrompt, context: RequestContext) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the token ids of a conversation. Raises QuireError."""
        with charged(self._serving.pipeline.charge, context.tenant, [prompt]) as settle:
            ids, _end, _us = await self._tokenizer.render(prompt, context, max_tokens=0)
            settle([len(ids)])
        return ids


def _rendered_prompts(
    rendering: Rendering, request_id: str
) -> list[tuple[str, np.ndarray[Any, np.dtype[np.int32]], Any]]:
    """Return the request id, token ids and sampling params of each prompt; the ids of several prompts are numbered."""
    single = len(rendering.prompts) == 1
    return [
        (request_id if single else f"{request_id}-{i}", ids, sampling_params_of(rendering.job, max_tokens))
        for i, (ids, max_tokens) in enumerate(rendering.prompts)
    ]


def _context(request: Request) -> RequestContext:
    exchange = exchange_of(request.scope)
    return RequestContext(exchange.request_id, 0, exchange.tenant)


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
