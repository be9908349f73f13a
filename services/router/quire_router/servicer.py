"""Implements quire.v1.Inference. Each method authenticates the call, translates it, and leaves the rest to other parts
of the router."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.v1 import inference_pb2 as ib
from quire.v1 import inference_pb2_grpc
from quire_common.credit.hello import model_to_pb
from quire_common.errors import QuireError
from quire_common.telemetry import tracing
from quire_common.telemetry.interceptors.server_call import REQUEST_ID_KEY
from quire_common.telemetry.logs import bind_request_id
from quire_router.front.grpc.client_watch import ClientWatch
from quire_router.front.grpc.request_codec import parse_generate
from quire_router.front.grpc.response_codec import GenerateFormat
from quire_router.front.request_ids import new_request_id, request_id_from
from quire_router.requests.best_of import whole_answers
from quire_router.requests.deadline import shortest_timeout_s
from quire_router.sequences.job import Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from quire_router.api_keys import ApiKeys
    from quire_router.config import RouterConfig
    from quire_router.front.parameters.request_limits import Limits
    from quire_router.limits.rate_limits import RateLimits
    from quire_router.principal import Principal
    from quire_router.requests.beam_search import BeamSearch
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.generation import Generation
    from quire_router.requests.pipeline import Pipeline
    from quire_router.sequences.delta import Delta
    from quire_router.watchdog import Watchdog


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public gRPC service. A cancelled call aborts its sequences at once, because the generator's `finally` runs in
    the call."""

    def __init__(
        self,
        pipeline: Pipeline,
        beams: BeamSearch,
        catalog: Catalog,
        keys: ApiKeys,
        limits: Limits,
        config: RouterConfig,
        watchdog: Watchdog,
        rates: RateLimits,
    ) -> None:
        self._pipeline = pipeline
        self._beams = beams
        self._catalog = catalog
        self._keys = keys
        self._limits = limits
        self._timeout_s = config.request_timeout_s
        self._stall_s = config.client_stall_s
        self._watchdog = watchdog
        self._rates = rates

    async def Generate(self, request: ib.GenerateRequest, context: Any) -> AsyncIterator[ib.GenerateResponse]:
        """Run a request and yield its responses, all at once or as they come. Before the job starts, the request id is
        sent as initial metadata. A cancelled call aborts its sequences. ClientWatch aborts those of a client that stops
        reading for `--client-stall-s`; this call then lasts until the client reads or leaves. A beam search has ended
        before its first response. Raises QuireError before the first response, for a wrong key or a limit, too; a later
        QuireError is the last response."""
        arrived_ns = time.monotonic_ns()
        metadata = _metadata(context)
        principal = self._keys.authenticate(metadata.get("authorization", ""))
        await self._rates.admit(principal)
        job = parse_generate(request, self._limits)
        caller = self._caller(request, metadata, principal, context.time_remaining())
        # Initial metadata tells the client that the call is begun. Without them, the client may send the call again.
        await context.send_initial_metadata(((REQUEST_ID_KEY, caller.request_id),))
        if job.beams:
            for response in _whole_responses(*await self._beams.run(job, caller, arrived_ns)):
                yield response
            return
        generation = await self._pipeline.generate(job, caller, arrived_ns)
        with (
            contextlib.closing(generation),
            contextlib.closing(ClientWatch(self._watchdog, generation, self._stall_s)) as client,
        ):
            async for response in _responses(generation):
                client.sends()
                yield response
                client.sent()

    async def ListModels(self, request: ib.ListModelsRequest, context: Any) -> ib.ListModelsResponse:
        """Return the models that the caller's key may use, each under its public name. Raises Unauthenticated for a
        missing or unknown key, and PermissionDenied if the key lacks the scope for inference."""
        principal = self._keys.authenticate(_metadata(context).get("authorization", ""))
        served = self._catalog.served(principal.limits)
        return ib.ListModelsResponse(models=[model_to_pb(replace(entry.model, name=entry.name)) for entry in served])

    def _caller(
        self, request: ib.GenerateRequest, metadata: dict[str, str], principal: Principal, remaining_s: float | None
    ) -> Caller:
        """Make the caller of a request from its fields, metadata and principal. The request id is that of the field,
        else of the metadata, else a new one; it is bound to the log. The trace is that of the call's own span, else of
        the metadata. The shortest of the router's, the request's and the call's timeout counts (see
        `shortest_timeout_s`)."""
        request_id = request_id_from(request.request_id) or request_id_from(metadata.get("x-request-id", ""))
        request_id = request_id or new_request_id()
        bind_request_id(request_id)
        # The call's own span, where there is one, is between the client's and ours.
        trace = tracing.inject_headers() or metadata
        return Caller(
            request_id=request_id,
            tenant=principal.tenant,
            tenant_name=principal.tenant_name,
            traceparent=trace.get("traceparent", ""),
            tracestate=trace.get("tracestate", ""),
            priority=request.priority,
            limits=principal.limits,
            timeout_s=shortest_timeout_s(remaining_s, self._timeout_s, request.timeout_ms / 1000),
        )


def _whole_responses(generation: Generation, deltas: Sequence[Delta]) -> Iterator[ib.GenerateResponse]:
    """Convert whole answers to responses, each when the client takes it. The last one has usage and timings."""
    answer = GenerateFormat(generation)
    for delta in deltas[:-1]:
        yield answer.delta(delta)
    yield answer.finish(answer.delta(deltas[-1]))


async def _responses(generation: Generation) -> AsyncIterator[ib.GenerateResponse]:
    """Yield a generation's responses until it has ended. A job that is not streamed waits for its end, and then yields
    one response for each of the n best answers of each prompt. An error before the first response is raised; a
    QuireError after it becomes the last response."""
    if not generation.job.wants.stream:
        for response in _whole_responses(generation, await whole_answers(generation)):
            yield response
        return
    answer = GenerateFormat(generation)
    deltas = await generation.next_deltas()
    while True:
        responses = [answer.delta(delta) for delta in deltas]
        if not generation.running:
            answer.finish(responses[-1])
        for response in responses:
            yield response
        if not generation.running:
            return
        try:
            deltas = await generation.next_deltas()
        except QuireError as error:
            yield answer.error(error)
            return


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
