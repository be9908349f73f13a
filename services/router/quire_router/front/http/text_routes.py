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
from quire_router.front.http.parsing.sampling_params import sampling_params_of
from quire_router.off_loop import MOST_VALUES, off_loop
from quire_router.requests.token_charge import charged
from quire_router.sequences.job import ChatPrompt

if TYPE_CHECKING:
    from starlette.requests import Request

    from quire_router.front.http.generate import Serving
    from quire_router.front.http.parsing.text_fields import (
        CountRequest,
        DetokenizeRequest,
        RenderRequest,
        TokenizeRequest,
    )
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.pipeline import Rendering
    from quire_router.text.token_bytes import TokenBytes
    from quire_router.text.tokenizer_client import TokenizerClient


class TextRoutes:
    """Endpoints for POST. Those that do not render check no lengths against the context, since an answer need not fit.
    The tokens count against the tenant's limit in the same way as those of a prompt."""

    def __init__(self, serving: Serving, catalog: Catalog, tokenizer: TokenizerClient, token_bytes: TokenBytes) -> None:
        self._serving = serving
        self._catalog = catalog
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids of a text or a conversation, their count and the model's context length. If asked
        for, the answer also has the text of each token. The tokens are charged to the tenant. A long answer is written
        outside the event loop. Raises QuireError for a body that `Serving.parse` refuses, a model that is unknown or
        that the key may not use, and an error of the tokenizer."""
        asked: TokenizeRequest = await self._serving.parse("tokenize", request.scope, request.receive)
        context, prompt = _context(request), asked.prompt
        served = self._catalog.resolve(asked.model, exchange_of(request.scope).limits)
        if isinstance(prompt, ChatPrompt):
            ids = await self._tokenize_chat(prompt, context)
        else:
            with charged(self._serving.pipeline.charge, context.tenant, [prompt]) as settle:
                (ids,), _us = await self._tokenizer.encode(
                    [prompt.text], context, add_special_tokens=asked.add_special_tokens, max_tokens=0
                )
                settle([len(ids)])
        # As many as a body has bytes: as an array they take 4 bytes each, and a tenth of the time.
        heavy = len(ids) > MOST_VALUES
        if asked.return_token_strs:
            await self._token_bytes.ensure(
                (await off_loop(lambda: np.unique(ids), heavy=heavy, tenant=context.tenant)).tolist()
            )

        def written() -> bytes:
            """Return the answer as JSON. `token_strs` is null unless the client asked for it."""
            answer: dict[str, Any] = {
                "count": len(ids),
                "max_model_len": served.model.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            if asked.return_token_strs:
                answer["token_strs"] = [token_text(self._token_bytes.get(token_id)) for token_id in ids.tolist()]
            return dumps_in_pieces(answer)

        return Response(await off_loop(written, heavy=heavy, tenant=context.tenant), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of token ids, special tokens included; no ids are an empty text. The tokens are charged
        to the tenant. Raises QuireError for a body that `Serving.parse` refuses, a model that is unknown or that the
        key may not use, and an error of the tokenizer."""
        asked: DetokenizeRequest = await self._serving.parse("detokenize", request.scope, request.receive)
        exchange, ids = exchange_of(request.scope), asked.prompt.ids
        self._catalog.resolve(asked.model, exchange.limits)
        with charged(self._serving.pipeline.charge, exchange.tenant, [asked.prompt]):
            text = await self._tokenizer.decode(ids, skip_special_tokens=False) if len(ids) else ""
        return _json({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """Answer with the number of tokens in the input of an Anthropic message, which are charged to the tenant.
        Raises QuireError for a body that `Serving.parse` refuses, a model that is unknown or that the key may not use,
        and an error of the tokenizer."""
        asked: CountRequest = await self._serving.parse("count", request.scope, request.receive)
        self._catalog.resolve(asked.model, exchange_of(request.scope).limits)
        return _json({"input_tokens": len(await self._tokenize_chat(asked.prompt, _context(request)))})

    async def render_chat(self, request: Request) -> Response:
        """Answer with the body for /inference/v1/generate that makes the same request of an engine as this chat. Raises
        QuireError."""
        (rendered,) = await self._rendered(request, "chat_render")
        return _json(rendered)

    async def render_completion(self, request: Request) -> Response:
        """Answer with a list: for each prompt of a completion, the body for /inference/v1/generate that asks an engine
        for the same. Raises QuireError."""
        return _json(await self._rendered(request, "completion_render"))

    async def _rendered(self, request: Request, parser: str) -> list[dict[str, Any]]:
        """Parse the body with the parser of this name, and tokenize its prompts without running them; their tokens are
        charged to the tenant. Returns for each prompt the body for /inference/v1/generate that asks for the same.
        Raises the QuireError of `Serving.parse`, `Pipeline.render` and `sampling_params_of`."""
        asked: RenderRequest = await self._serving.parse(parser, request.scope, request.receive)
        exchange, parsed = exchange_of(request.scope), asked.request
        caller = self._serving.caller(exchange, parsed)
        rendering = await self._serving.pipeline.render(parsed.job, caller, exchange.arrived_ns)
        common = {
            "model": rendering.served.name,
            "features": None,
            "stream": parsed.stream,
            "stream_options": orjson.Fragment(asked.stream_options_json),
            "cache_salt": parsed.job.cache_salt or None,
            "priority": parsed.priority,
            "kv_transfer_params": orjson.Fragment(asked.kv_transfer_params_json),
        }
        limit = {"timeout_s": parsed.timeout_s} if parsed.timeout_s else {}
        return [
            {"request_id": name, "token_ids": ids.tolist(), "sampling_params": {**params, **limit}, **common}
            for name, ids, params in _rendered_prompts(rendering, caller.request_id)
        ]

    async def _tokenize_chat(self, prompt: ChatPrompt, context: RequestContext) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the token ids of a conversation under its model's chat template, and charge the tenant for them.
        Raises QuireError if the tokenizer refuses the conversation or cannot be reached."""
        with charged(self._serving.pipeline.charge, context.tenant, [prompt]) as settle:
            ids, _end, _us = await self._tokenizer.render(prompt, context, max_tokens=0)
            settle([len(ids)])
        return ids


def _rendered_prompts(
    rendering: Rendering, request_id: str
) -> list[tuple[str, np.ndarray[Any, np.dtype[np.int32]], Any]]:
    """Return for each prompt its request id, token ids and sampling params. With several prompts, each id gets the
    number of its prompt as a suffix."""
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
