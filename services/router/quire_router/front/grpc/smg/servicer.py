"""Implements vllm.grpc.engine.VllmEngine. Each method authenticates the call, translates it, and leaves the rest to
other parts of the router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2 as cb
from smg_grpc_proto.generated import vllm_engine_pb2 as vb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from quire_common.errors import Aborted, QuireError, Unsupported
from quire_common.identity.callers import identity_of
from quire_common.telemetry import tracing
from quire_common.telemetry.audit import BEGUN, audit
from quire_common.telemetry.logs import bind_request_id
from quire_common.version import installed_version
from quire_router.front.grpc.client_watch import ClientWatch
from quire_router.front.grpc.smg.event_queue import MOST_BYTES, EventQueue
from quire_router.front.grpc.smg.kv_event_codec import engine_load, snapshot_batch, tail_batch
from quire_router.front.grpc.smg.request_codec import aborted_ids, parse_generate
from quire_router.front.grpc.smg.response_codec import SmgFormat
from quire_router.front.grpc.smg.sent_sequences import SentSequences
from quire_router.front.request_ids import new_request_id, request_id_from
from quire_router.principal import ADMIN, INFERENCE, NO_LIMITS
from quire_router.replicas.fleet import no_replica
from quire_router.requests.deadline import shortest_timeout_s
from quire_router.sequences.job import Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import grpc

    from quire.v1 import common_pb2 as pb
    from quire_router.front.grpc.smg.parts import SmgParts
    from quire_router.principal import Principal
    from quire_router.replicas.replica import Replica
    from quire_router.requests.generation import Generation

_ABORTED = "ABORTED"
_SUBSCRIBE = "vllm.grpc.engine.VllmEngine/SubscribeKvEvents"


def add_vllm_engine(server: grpc.aio.Server, parts: SmgParts) -> str:
    """Register the VllmEngine service at the server; return its full name."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(parts), server)
    return str(vb.DESCRIPTOR.services_by_name["VllmEngine"].full_name)


class _Abortable:
    """A Generate call, as `Abort` finds it."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._aborted = False

    def begin(self, generation: Generation) -> None:
        """Set the generation of the call, and abort it if the call was aborted before."""
        self._generation = generation
        if self._aborted:
            self.abort()

    def abort(self) -> None:
        """Abort the generation, or note that it is to be aborted as soon as it begins."""
        self._aborted = True
        if self._generation is not None:
            self._generation.cancel(Aborted(_ABORTED, "The request was aborted.", "Send it again."))


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # generated without types
    """The VllmEngine service in front of one scheduler."""

    def __init__(self, parts: SmgParts) -> None:
        self._parts = parts
        self._running: dict[tuple[str, str], list[_Abortable]] = {}
        self._began, self._received = time.monotonic(), 0.0
        self._sent: SentSequences[pb.Epoch] = SentSequences()

    async def Generate(self, request: vb.GenerateRequest, context: Any) -> AsyncIterator[vb.GenerateResponse]:
        """Authenticate the caller, apply the key's rate limit, run the request on the first model that the key may use,
        and yield its responses, as a stream or as one for each choice. A missing or unusable request id is replaced by
        a random one. Once the request is parsed, `Abort` finds it by tenant and id, and ends it without an error. The
        request of a client that reads nothing for `client_stall_s` ends with CLIENT_STALLED. The request ends after
        `request_timeout_s` or at the call's deadline, whichever comes first; when the call ends, its sequences end too.
        The time of arrival becomes the service's last one. Raises the QuireError of each step: authentication, rate
        limit, parsing, admission, generation."""
        arrived_ns, self._received = time.monotonic_ns(), time.time()
        principal = self._authenticate(context)
        await self._parts.rates.admit(principal)
        max_model_len = self._parts.catalog.resolve("", principal.limits).model.max_model_len
        job = await parse_generate(request, self._parts.limits, max_model_len)
        request_id = request_id_from(request.request_id) or new_request_id()
        bind_request_id(request_id)
        # The call's own span, where there is one, is between the client's and ours.
        trace = tracing.inject_headers() or dict(context.invocation_metadata() or ())
        caller = Caller(
            request_id,
            principal.tenant,
            principal.tenant_name,
            limits=principal.limits,
            traceparent=str(trace.get("traceparent", "")),
            tracestate=str(trace.get("tracestate", "")),
            timeout_s=shortest_timeout_s(context.time_remaining(), self._parts.config.request_timeout_s),
        )
        with (
            self._abortable(principal.tenant, request_id) as abortable,
            contextlib.closing(await self._parts.pipeline.generate(job, caller, arrived_ns)) as generation,
            contextlib.closing(
                ClientWatch(self._parts.watchdog, generation, self._parts.config.client_stall_s)
            ) as client,
        ):
            abortable.begin(generation)
            async for response in _responses(generation, stream=request.stream):
                client.sends()
                yield response
                client.sent()

    async def Abort(self, request: vb.AbortRequest, context: Any) -> vb.AbortResponse:
        """Cancel the requests of the caller's tenant that have these ids; other ids are ignored. A request whose prompt
        is still being tokenized ends when it has been submitted. Raises InvalidArgument for too many ids."""
        principal = self._authenticate(context)
        for request_id in aborted_ids(request):
            for abortable in self._running.get((principal.tenant, request_id), ()):
                abortable.abort()
        return vb.AbortResponse()

    async def HealthCheck(self, request: vb.HealthCheckRequest, context: Any) -> vb.HealthCheckResponse:
        """Return whether there is a ready replica and admission is open; if not, the message says that no requests are
        taken. The caller must be authenticated, as in every method."""
        self._authenticate(context)
        healthy = self._parts.fleet.ready and self._parts.admission.open
        return vb.HealthCheckResponse(healthy=healthy, message="" if healthy else "The engine takes no requests.")

    async def GetModelInfo(self, request: vb.GetModelInfoRequest, context: Any) -> vb.GetModelInfoResponse:
        """Describe the first model that the key may use: its own name (`model_path`, `tokenizer_path`) and the one it
        is served under, its context length, vocabulary size, architecture and EOS token ids. The longest input is one
        token shorter than the context. Raises Unavailable while no model is known, and PermissionDenied if the key may
        use none."""
        served = self._parts.catalog.resolve("", self._authenticate(context).limits)
        model = served.model
        return vb.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=served.name,
            tokenizer_path=model.name,
            model_type=model.architecture.removesuffix("ForCausalLM").lower(),
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_model_len - 1,
        )

    async def GetServerInfo(self, request: vb.GetServerInfoRequest, context: Any) -> vb.GetServerInfoResponse:
        """Return the number of sequences in flight (as `active_requests`), whether admission is paused, the uptime in
        seconds, and the Unix time at which the last Generate call arrived (0: none has). Also returns the engine's page
        size, KV dtype and most sequences in a batch. Raises Unavailable while there is no replica or no model is
        known."""
        self._authenticate(context)
        replica, model = self._replica(), self._parts.catalog.resolve("", NO_LIMITS).model
        return vb.GetServerInfoResponse(
            active_requests=self._parts.admission.inside,
            is_paused=not self._parts.admission.open,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._began,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=model.pages.groups[0].dtype if model.pages.groups else "",
            block_size=model.pages.page_size,
            max_num_seqs=replica.load.max_num_seqs,
        )

    async def GetLoads(self, request: vb.GetLoadsRequest, context: Any) -> vb.GetLoadsResponse:
        """Return the load that the scheduler reported last: running and waiting requests, throughput, and KV use, with
        pages counted as tokens. For a data-parallel rank other than 0, the list of loads is empty. Raises Unavailable
        while there is no replica or no model is known."""
        self._authenticate(context)
        load, page_size = self._replica().load, self._parts.catalog.resolve("", NO_LIMITS).model.pages.page_size
        used = load.pages - load.free_pages
        rank = vb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=_int32(used * page_size),
            max_total_num_tokens=_int32(load.pages * page_size),
            token_usage=used / load.pages if load.pages else 0.0,
            gen_throughput=load.decode_tokens_per_s,
            utilization=min(1.0, load.running / load.max_num_seqs),
            max_running_requests=load.max_num_seqs,
            num_waiting_uncached_tokens=_int32(load.waiting_prefill_tokens),
        )
        asked = not request.HasField("dp_rank") or request.dp_rank == 0
        return vb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=installed_version("quire-router"),
            dp_rank_count=1,
            loads=[rank] if asked else [],
        )

    async def SubscribeKvEvents(
        self, request: cb.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[cb.KvEventBatch]:
        """Yield the scheduler's page events in batches, each with the scheduler's load; the key needs the scope
        `admin`. The events begin at `start_sequence_number`. They begin with a snapshot instead if it is 0 or 1, if the
        number before it may be of an earlier epoch or was not sent to any subscriber yet, or if the scheduler does not
        have these events any more. If asked for, a batch with only the load comes first. Raises Overloaded for a
        subscriber that is too slow, Unavailable while there is no replica or no model is known, and the error that ends
        the scheduler's stream. The audit log also records the beginning, because a subscription may last for weeks."""
        self._authenticate(context, ADMIN)  # token ids of all tenants
        audit(_SUBSCRIBE, BEGUN, identity=identity_of(context.auth_context() or {}) or "", peer=context.peer())
        replica, sample = self._replica(), 0
        if request.load_records_before_first_batch:
            yield cb.KvEventBatch(timestamp=time.time(), dp_rank=0, load=engine_load(replica.load, 0, load_only=True))
        after = max(0, request.start_sequence_number - 1)
        epoch = self._sent.epoch_of(after)
        if epoch is None:
            after = 0  # a snapshot
        queue: EventQueue[pb.PageEvents] = EventQueue(MOST_BYTES)
        filling = asyncio.create_task(queue.fill(replica.client.watch_pages(epoch, after)), name="KV events")
        try:
            async for epoch, batch in self._batches(queue.messages()):
                sample += 1
                batch.load.CopyFrom(engine_load(replica.load, sample))
                self._sent.sent(epoch, batch.sequence_number)
                yield batch
            await filling  # why there is nothing more
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _batches(self, frames: AsyncIterator[pb.PageEvents]) -> AsyncIterator[tuple[pb.Epoch, cb.KvEventBatch]]:
        """Convert frames to batches, each with the scheduler's epoch. All frames of a snapshot make one batch; frames
        without changes are left out, and so is an empty snapshot with the sequence number 0."""
        page_size = self._parts.catalog.resolve("", NO_LIMITS).model.pages.page_size
        snapshot: list[pb.PageEvents] = []
        async for frame in frames:
            if not frame.snapshot:
                batch = tail_batch(frame, page_size)
                if batch.events:  # otherwise it says that nothing was missed
                    yield frame.epoch, batch
                continue
            snapshot.append(frame)
            if frame.snapshot_complete:
                batch, snapshot = snapshot_batch(snapshot, page_size), []
                if batch.sequence_number or batch.snapshot.blocks:  # otherwise nothing has ever happened there
                    yield frame.epoch, batch

    async def FlushCache(self, request: cb.FlushCacheRequest, context: Any) -> cb.FlushCacheResponse:
        self._authenticate(context)
        return cb.FlushCacheResponse(success=False, message="This engine's cache cannot be emptied from here.")

    async def StartProfile(self, request: cb.StartProfileRequest, context: Any) -> cb.ProfileResponse:
        self._authenticate(context)
        return cb.ProfileResponse(success=False, message="This engine has no profiler.")

    async def StopProfile(self, request: cb.StopProfileRequest, context: Any) -> cb.ProfileResponse:
        self._authenticate(context)
        return cb.ProfileResponse(success=False, message="This engine has no profiler.")

    async def Embed(self, request: vb.EmbedRequest, context: Any) -> vb.EmbedResponse:
        self._authenticate(context)
        raise Unsupported("UNSUPPORTED_METHOD", "This engine does not compute embeddings.", "Ask an engine that does.")

    async def GetTokenizer(self, request: cb.GetTokenizerRequest, context: Any) -> AsyncIterator[cb.GetTokenizerChunk]:
        """Raise Unsupported, because this engine does not offer its tokenizer."""
        self._authenticate(context)
        raise Unsupported(
            "UNSUPPORTED_METHOD", "This engine does not send its tokenizer.", "Give the gateway the model's own folder."
        )
        yield  # an async generator, as the method is a stream

    def _authenticate(self, context: Any, scope: str = INFERENCE) -> Principal:
        """Return the principal of the call's API key. Raises Unauthenticated, and PermissionDenied if the key lacks
        `scope`."""
        metadata = dict(context.invocation_metadata() or ())
        return self._parts.keys.authenticate(str(metadata.get("authorization", "")), scope)

    @contextlib.contextmanager
    def _abortable(self, tenant: str, request_id: str) -> Iterator[_Abortable]:
        """Let `Abort` find the call while the `with` block lasts."""
        running, abortable = self._running.setdefault((tenant, request_id), []), _Abortable()
        running.append(abortable)
        try:
            yield abortable
        finally:
            running.remove(abortable)
            if not running:
                self._running.pop((tenant, request_id), None)

    def _replica(self) -> Replica:
        """Return the one replica. Raises Unavailable while discovery names none."""
        for replica in self._parts.fleet.replicas.values():
            return replica
        raise no_replica()


def _int32(count: int) -> int:
    """Return the count, or the greatest int32 if the count is greater."""
    return min(count, 2**31 - 1)


async def _responses(generation: Generation, *, stream: bool) -> AsyncIterator[vb.GenerateResponse]:
    """Yield a generation's responses until it has ended. An aborted generation ends without an error, as in vLLM: each
    choice that was still running gets a last response with the finish reason `abort`. Raises any other QuireError that
    ended it. `stream`: the responses are those of a streamed request."""
    answer = SmgFormat(generation, stream=stream)
    ended: set[int] = set()
    while generation.running:
        try:
            deltas = await generation.next_deltas()
        except QuireError as error:
            if error.code != _ABORTED:
                raise
            for sequence in generation.sequences:
                if sequence.index not in ended:
                    yield answer.complete(sequence, "abort")
            return
        for delta in deltas:
            if delta.finish:
                ended.add(delta.index)
            for response in answer.responses(delta):
                yield response
