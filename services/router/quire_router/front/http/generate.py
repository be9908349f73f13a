"""Endpoints that generate: they read and parse a body, run the job and write its answer. Serving has the steps that all
of them share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from quire_common.sequence import unsupported
from quire_common.telemetry.logs import bind_request_id
from quire_router.front.http.body import client_gone, read_json
from quire_router.front.http.body_budget import BodyBudget
from quire_router.front.http.exchange import exchange_of, send_json, warning_headers
from quire_router.front.http.stream_writer import write_stream
from quire_router.front.request_ids import request_id_from
from quire_router.off_loop import off_loop
from quire_router.requests.best_of import whole_answers
from quire_router.requests.deadline import shortest_timeout_s
from quire_router.sequences.job import Caller

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from starlette.types import Receive, Scope, Send

    from quire_router.config import RouterConfig
    from quire_router.front.http.bodies.body_parser import BodyParser
    from quire_router.front.http.bodies.body_parsers import InvocationRequest
    from quire_router.front.http.exchange import Exchange
    from quire_router.front.http.formats.answer_format import AnswerFormat
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.beam_search import BeamSearch
    from quire_router.requests.generation import Generation
    from quire_router.requests.pipeline import Pipeline

    MakeFormat = Callable[[Generation, ParsedRequest], AnswerFormat]

T = TypeVar("T")
# vLLM's. What serves here is one engine to its clients, of rank 0: the router chooses among replicas.
_RANK = b"x-data-parallel-rank"


class Serving:
    """Runs parsed requests for endpoints, and holds the configuration that applies to all of them."""

    def __init__(self, pipeline: Pipeline, beams: BeamSearch, bodies: BodyParser, config: RouterConfig) -> None:
        self.pipeline = pipeline
        self._beams = beams
        self._bodies = bodies
        self._max_body_bytes = config.max_body_bytes
        self._body_budget = BodyBudget(config.max_bodies_mib << 20)
        self._timeout_s = config.request_timeout_s
        self._ping_s = config.stream_ping_s

    async def parse(self, parser: str, scope: Scope, receive: Receive) -> Any:
        """Read the body, and return what the parser of this name makes of it. The body holds memory of the budget until
        the exchange releases it. Raises InvalidArgument, TooLarge, Unavailable where the budget has no room or parsing
        fails, Internal for a mistake of the parser, and Aborted where the client leaves. Raises Unsupported for what
        the parser does not support, and for a header `x-data-parallel-rank` other than 0."""
        if dict(scope["headers"]).get(_RANK, b"0") != b"0":
            raise unsupported(_RANK.decode())
        exchange = exchange_of(scope)
        lease = self._body_budget.lease(exchange.tenant)
        exchange.hold_body(lease)
        body = await read_json(scope, receive, self._max_body_bytes, lease)
        defaults = self.pipeline.sampling_defaults(exchange.limits)
        return await self._bodies.parse(parser, body, exchange.tenant, defaults, timings=exchange.wants_timings)

    def caller(self, exchange: Exchange, parsed: ParsedRequest) -> Caller:
        """Make the caller of a request: ids, tenant, trace, priority, and the shorter of the router's and the body's
        timeout (0: none). If no header has a usable request id, a valid id in the body replaces the exchange's, also in
        the log."""
        if not exchange.id_from_header and parsed.request_id:
            exchange.use_request_id(request_id_from(parsed.request_id) or exchange.request_id)
            bind_request_id(exchange.request_id)
        return Caller(
            request_id=exchange.request_id,
            tenant=exchange.tenant,
            tenant_name=exchange.tenant_name,
            traceparent=exchange.traceparent,
            tracestate=exchange.tracestate,
            priority=parsed.priority,
            limits=exchange.limits,
            timeout_s=shortest_timeout_s(None, self._timeout_s, parsed.timeout_s),
        )

    async def run(
        self, scope: Scope, receive: Receive, send: Send, parsed: ParsedRequest, make_format: MakeFormat
    ) -> None:
        """Run a parsed job and send its answer, as a stream or whole. The memory that the body holds is released when
        the prompts have been tokenized; a beam search holds it to its end. If the client leaves, the job ends at once.
        A large answer that is not streamed is written outside the event loop. Except for a beam search, a header names
        the job's warnings, and the format may store the answer before its end is sent. Raises the job's QuireError if
        it fails before anything was sent; a later failure becomes the stream's last event."""
        exchange = exchange_of(scope)
        caller = self.caller(exchange, parsed)
        with _Watch(receive) as watch:
            if parsed.job.beams:
                search = self._beams.run(parsed.job, caller, exchange.arrived_ns)
                generation, deltas = await watch.unless_gone(search)
                answer = make_format(generation, parsed)
                document = await off_loop(
                    lambda: answer.document(deltas), heavy=generation.is_large, tenant=exchange.tenant
                )
                await send_json(send, document)
                return
            generation = await watch.unless_gone(self.pipeline.generate(parsed.job, caller, exchange.arrived_ns))
            exchange.release_body()
            try:
                watch.on_gone(generation)
                exchange.add_headers(warning_headers(generation.job.warnings))
                answer = make_format(generation, parsed)
                if parsed.stream:
                    await write_stream(scope, send, generation, answer, self._ping_s)
                else:
                    deltas = await whole_answers(generation)
                    document = await off_loop(
                        lambda: answer.document(deltas), heavy=generation.is_large, tenant=exchange.tenant
                    )
                    await answer.settle()
                    await send_json(send, document)
            finally:
                generation.close()


class GenerateEndpoint:
    """An ASGI application for POST. The edge converts the errors that it raises into answers."""

    def __init__(self, serving: Serving, parser: str, make_format: MakeFormat) -> None:
        self._serving = serving
        self._parser = parser
        self._make_format = make_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        parsed = await self._serving.parse(self._parser, scope, receive)
        await self._serving.run(scope, receive, send, parsed, self._make_format)


class Invocations:
    """SageMaker's single path for all requests: a body with messages is a chat, and a body with a prompt is a
    completion."""

    def __init__(self, serving: Serving, chat: MakeFormat, completion: MakeFormat) -> None:
        self._serving = serving
        self._chat = chat
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked: InvocationRequest = await self._serving.parse("invocation", scope, receive)
        make_format = self._chat if asked.is_chat else self._completion
        await self._serving.run(scope, receive, send, asked.request, make_format)


class _Watch:
    """Notices when the client leaves, and then ends the client's work. A task watches the connection for as long as the
    `with` block lasts."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._starting: asyncio.Task[Any] | None = None
        self._generation: Generation | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """Await `work` and return its result. If the client leaves meanwhile, `work` is cancelled and Aborted
        (CLIENT_GONE) is raised. If the client has left before, `work` is not cancelled."""
        self._starting = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if self._starting is None or not self._gone:
                raise
            self._starting.uncancel()
            raise client_gone() from None
        finally:
            self._starting = None

    def on_gone(self, generation: Generation) -> None:
        """Abandon this generation when the client leaves, or at once if it has already left."""
        self._generation = generation
        if self._gone:
            generation.abandon(client_gone())

    async def _run(self) -> None:
        """Wait until the client leaves or the answer has ended. Then cancel the work that `unless_gone` awaits, and
        abandon the generation if its sequences still run."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._starting is not None:
            self._starting.cancel()
        if self._generation is not None and self._generation.running:
            self._generation.abandon(client_gone())
