"""vllm.grpc.engine.VllmEngine over a fake scheduler, called by the client of PyPI's smg-grpc-proto."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as cb
from smg_grpc_proto.generated import vllm_engine_pb2 as vb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from quire.v1 import common_pb2 as pb
from quire.v1 import scheduler_pb2 as sb
from quire_common.columns import pack_i32
from quire_common.errors import ConfigError, from_rpc_error
from quire_router.front.grpc.smg import servicer as smg_servicer
from quire_router.front.grpc.smg.kv_event_codec import block_hash
from tests.fakes.router.router_faults import nothing_left, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

PROMPT = [97, 98, 99]
PAGES = [bytes([number]) * 32 for number in range(1, 6)]
EPOCH = pb.Epoch(boot_id=7, run=1)


class PagedScheduler(FakeScheduler):
    """`frames` are what a watcher of tokens hears; the router's own, for its index, hears nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.frames: asyncio.Queue[pb.PageEvents] = asyncio.Queue()
        self.left = asyncio.Event()
        self.watches: list[pb.WatchPagesRequest] = []

    async def GetModelInfo(self, request: sb.GetModelInfoRequest, context: Any) -> sb.GetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        answer.model.pages.page_size = 4
        return answer

    async def WatchPages(self, request: pb.WatchPagesRequest, context: Any) -> AsyncIterator[pb.PageEvents]:
        if not request.with_token_ids:
            await asyncio.Event().wait()
        self.watches.append(request)
        try:
            while True:
                yield await self.frames.get()
        finally:
            self.left.set()


@contextlib.asynccontextmanager
async def facade(scheduler: FakeScheduler | None = None, **config: Any) -> AsyncIterator[tuple[RouterRig, Any]]:
    async with (
        router_rig([scheduler or PagedScheduler()], vllm_grpc=True, **config) as rig,
        grpc.aio.insecure_channel(rig.grpc_address) as channel,
    ):
        yield rig, vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(**fields: Any) -> vb.GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 5, **fields.pop("sampling", {})}
    tokenized = vb.TokenizedInput(input_ids=PROMPT)
    return vb.GenerateRequest(
        **{"request_id": "r1", "tokenized": tokenized, "sampling_params": vb.SamplingParams(**params), **fields}
    )


async def test_generate_returns_a_whole_answer() -> None:
    async with facade() as (rig, stub):
        answers = [answer async for answer in stub.Generate(request())]
        (whole,) = (answer.complete for answer in answers)
        assert list(whole.output_ids) == [97, 98, 99, 97, 98]
        assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", 3, 5)
        submitted = rig.scheduler.submits[0]
        assert submitted.context.request_id == "r1" and submitted.sequence.sampling.top_p == 1
        assert submitted.sequence.sampling.repetition_penalty in (0, 1)


async def test_generate_streams_two_samples_with_logprobs() -> None:
    async with facade() as (_, stub):
        asked = request(stream=True, sampling={"n": 2, "logprobs": 1, "temperature": 1.0, "seed": 4})
        chunks: dict[int, list[int]] = {0: [], 1: []}
        ends = {}
        async for answer in stub.Generate(asked):
            if answer.HasField("chunk"):
                chunk = answer.chunk
                assert chunk.index not in ends
                chunks[chunk.index] += chunk.token_ids
                assert chunk.completion_tokens == len(chunks[chunk.index]) and chunk.prompt_tokens == 3
                assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
                assert len(chunk.output_logprobs.top_logprobs) == len(chunk.token_ids)
            else:
                ends[answer.complete.index] = answer.complete
        assert sorted(ends) == [0, 1]
        for index, end in ends.items():
            assert list(end.output_ids) == chunks[index] == [97, 98, 99, 97, 98]
            assert len(end.output_logprobs.token_logprobs) == 5 and end.output_logprobs.token_logprobs[0] == -1


async def test_generate_accepts_text_and_stop_strings() -> None:
    async with facade() as (_, stub):
        asked = vb.GenerateRequest(
            text="abc", sampling_params=vb.SamplingParams(stop=["ca"], max_tokens=9, temperature=0)
        )
        (answer,) = [answer async for answer in stub.Generate(asked)]
        assert answer.complete.finish_reason == "stop" and answer.complete.matched_stop_str == "ca"


async def test_abort_ends_all_running_choices() -> None:
    async with facade() as (rig, stub):
        rig.scheduler.gate.clear()
        call = stub.Generate(request(sampling={"n": 2}, stream=True))
        await rig.scheduler.submitted.wait()
        await stub.Abort(vb.AbortRequest(request_ids=["other", "r1"]))
        answers = [answer.complete async for answer in call]
        assert [(end.index, end.finish_reason) for end in answers] == [(0, "abort"), (1, "abort")]
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 30)
        assert rig.router.admission.inside == 0


async def test_abort_of_a_request_that_is_being_tokenized_ends_it() -> None:
    async with facade() as (rig, stub):
        rig.scheduler.gate.clear()
        rig.tokenizer.hold_encode = asyncio.Event()
        params = vb.SamplingParams(max_tokens=5, temperature=0)
        call = stub.Generate(vb.GenerateRequest(request_id="r1", text="abc", sampling_params=params, stream=True))
        await until(lambda: bool(rig.tokenizer.encode_contexts))
        await stub.Abort(vb.AbortRequest(request_ids=["r1"]))
        rig.tokenizer.hold_encode.set()
        async with asyncio.timeout(30):
            assert [answer.complete.finish_reason async for answer in call] == ["abort"]
        await until(lambda: rig.router.admission.inside == 0 and nothing_left(rig))


async def test_requests_with_too_many_entries_fail_alone() -> None:
    async with facade(PagedScheduler(max_model_len=100)) as (rig, stub):
        rig.scheduler.gate.clear()
        call = stub.Generate(request(stream=True))
        await rig.scheduler.submitted.wait()
        calls = [
            stub.Abort(vb.AbortRequest(request_ids=["r1"] * 100_000)),
            stub.Generate(request(tokenized=vb.TokenizedInput(input_ids=PROMPT * 40))).read(),
            stub.Generate(request(sampling={"logit_bias": dict.fromkeys(range(2000), 1.0)})).read(),
        ]
        for call_, code in zip(calls, ("TOO_MANY_ITEMS", "PROMPT_TOO_LONG", "TOO_MANY_ITEMS"), strict=True):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(caught.value).code == code
        rig.scheduler.gate.set()
        assert [answer.complete.finish_reason async for answer in call][-1] == "length"


async def test_model_info_server_info_and_loads_are_served() -> None:
    async with facade(PagedScheduler(max_num_seqs=48, max_model_len=512)) as (rig, stub):
        assert (await stub.HealthCheck(vb.HealthCheckRequest())).healthy
        model = await stub.GetModelInfo(vb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("fake", 512, 300)
        assert (list(model.eos_token_ids), list(model.architectures), model.model_type) == (
            [256],
            ["FakeForCausalLM"],
            "fake",
        )
        server = await stub.GetServerInfo(vb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.max_num_seqs) == (0, False, 48)
        assert server.uptime_seconds > 0 and server.data_parallel_size == 1
        loads = await stub.GetLoads(vb.GetLoadsRequest())
        assert loads.dp_rank_count == 1 and loads.loads[0].max_running_requests == 48 and loads.timestamp
        assert not (await stub.GetLoads(vb.GetLoadsRequest(dp_rank=1))).loads
        assert not (await stub.FlushCache(cb.FlushCacheRequest())).success
        rig.router.admission.pause()
        assert not (await stub.HealthCheck(vb.HealthCheckRequest())).healthy


async def test_loads_are_clamped_to_int32() -> None:
    async with facade() as (rig, stub):
        (replica,) = rig.router.fleet.replicas.values()
        replica.load = replace(replica.load, pages=10**9, free_pages=1, waiting_prefill_tokens=2**32 - 1)
        (load,) = (await stub.GetLoads(vb.GetLoadsRequest())).loads
        most = 2**31 - 1
        assert (load.num_used_tokens, load.max_total_num_tokens, load.num_waiting_uncached_tokens) == (most, most, most)


def stored(parent: bytes, *hashes: bytes, tokens: int = 1) -> pb.StoredPages:
    ids = pack_i32([tokens] * len(hashes) * 4)
    return pb.StoredPages(parent=parent, hashes=hashes, medium="device", token_ids=ids)


async def test_kv_events_begin_with_a_snapshot_and_continue() -> None:
    scheduler = PagedScheduler()
    async with facade(scheduler) as (_, stub):
        frames = [
            pb.PageEvents(epoch=EPOCH, sequence=9, snapshot=True, stored=[stored(b"", PAGES[0], PAGES[1])]),
            pb.PageEvents(
                epoch=EPOCH, sequence=9, snapshot=True, snapshot_complete=True, stored=[stored(PAGES[1], PAGES[2])]
            ),
            pb.PageEvents(epoch=EPOCH, sequence=11, removed=[PAGES[2]], stored=[stored(PAGES[1], PAGES[3])]),
            pb.PageEvents(epoch=EPOCH, sequence=12, cleared=True),
        ]
        for frame in frames:
            scheduler.frames.put_nowait(frame)
        call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest(load_records_before_first_batch=True))
        load, snapshot, change, cleared = [await call.read() for _ in range(4)]
        assert load.load.load_only and load.sequence_number == 0 and load.load.max_running_requests == 64
        assert snapshot.sequence_number == 9 and snapshot.snapshot.blocks == 3
        assert snapshot.events[0].HasField("cleared")
        first, second = (event.stored for event in snapshot.events[1:])
        assert [block.block_hash for block in first.blocks] == [block_hash(PAGES[0]), block_hash(PAGES[1])]
        assert not first.HasField("parent_block_hash") and second.parent_block_hash == block_hash(PAGES[1])
        assert [list(block.token_ids) for block in first.blocks] == [[1] * 4] * 2 and first.blocks[0].block_size == 4
        assert first.tier == cb.KV_CACHE_TIER_DEVICE
        assert list(change.events[0].removed.block_hashes) == [block_hash(PAGES[2])]
        assert change.events[1].stored.blocks[0].block_hash == block_hash(PAGES[3])
        assert change.sequence_number == 11 and change.load.sample == 2 and not change.HasField("snapshot")
        assert cleared.events[0].HasField("cleared") and cleared.sequence_number == 12
        call.cancel()
        await asyncio.wait_for(scheduler.left.wait(), 30)
        # Who comes back names the next number; the facade knows of which epoch. That nothing was missed is no batch.
        scheduler.frames.put_nowait(pb.PageEvents(epoch=EPOCH, sequence=12))
        scheduler.frames.put_nowait(pb.PageEvents(epoch=EPOCH, sequence=13, stored=[stored(b"", PAGES[4])]))
        call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest(start_sequence_number=13))
        assert (await call.read()).sequence_number == 13
        assert scheduler.watches[-1].epoch == EPOCH and scheduler.watches[-1].after_sequence == 12
        assert all(watch.with_token_ids for watch in scheduler.watches)
        call.cancel()


async def test_kv_events_resume_only_within_the_same_scheduler_epoch() -> None:
    scheduler = PagedScheduler()
    async with facade(scheduler) as (_, stub):

        async def watched(start: int, frame: pb.PageEvents) -> tuple[pb.Epoch | None, int]:
            """What the scheduler is asked for by who names a number, and then hears this frame."""
            scheduler.left.clear()
            scheduler.frames.put_nowait(frame)
            call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest(start_sequence_number=start))
            assert (await call.read()).sequence_number == frame.sequence
            call.cancel()
            await asyncio.wait_for(scheduler.left.wait(), 30)
            asked = scheduler.watches[-1]
            return (asked.epoch if asked.HasField("epoch") else None), asked.after_sequence

        def change(epoch: pb.Epoch, sequence: int) -> pb.PageEvents:
            return pb.PageEvents(epoch=epoch, sequence=sequence, removed=[PAGES[0]])

        other = pb.Epoch(boot_id=8, run=1)
        assert await watched(5, change(EPOCH, 20)) == (None, 0)  # this facade never sent 4
        assert await watched(22, change(EPOCH, 20)) == (None, 0)  # nor 21
        assert await watched(21, change(EPOCH, 30)) == (EPOCH, 20)
        # The scheduler came back, and another subscriber has heard of it.
        assert await watched(0, change(other, 25)) == (None, 0)
        # Its own 30, or another's 25: nothing tells of which life.
        assert await watched(31, change(other, 26)) == (None, 0)
        assert await watched(26, change(other, 40)) == (None, 0)
        assert await watched(41, change(other, 41)) == (other, 40)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"json_schema": "{}"}},
        {"sampling": {"json_object": True}},
        {"sampling": {"logprobs": -1}},
        {"mm_inputs": vb.MultimodalInputs()},
        {"kv_transfer_params_json": '{"do_remote_prefill": true}'},
        {"data_parallel_rank": 1},
        {"tokenized": None},
        {"sampling": {"n": 1000}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"stop": [""]}},
        {"tokenized": vb.TokenizedInput(input_ids=[2**31])},
    ],
    ids=repr,
)
async def test_unsupported_fields_are_refused(fields: dict[str, Any]) -> None:
    async with facade() as (rig, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in stub.Generate(request(**fields))]
        assert caught.value.code().name in ("UNIMPLEMENTED", "INVALID_ARGUMENT")
        assert not rig.scheduler.submits


async def test_trace_context_of_the_caller_reaches_the_scheduler() -> None:
    async with facade() as (rig, stub):
        trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("tracestate", "a=b"))
        assert [answer async for answer in stub.Generate(request(), metadata=trace)]
        context = rig.scheduler.submits[0].context
        assert (("traceparent", context.traceparent), ("tracestate", context.tracestate)) == trace


async def test_every_method_requires_a_key() -> None:
    service = vb.DESCRIPTOR.services_by_name["VllmEngine"]
    async with facade(api_key=("k",)) as (rig, _), grpc.aio.insecure_channel(rig.grpc_address) as channel:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            make: Any = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
            call = make(b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if method.server_streaming else call)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name


@pytest.mark.parametrize(
    ("listen", "insecure", "answers"),
    [("0.0.0.0:0", False, False), ("0.0.0.0:0", True, True), ("127.0.0.1:0", False, True)],
)
async def test_without_keys_other_hosts_get_no_kv_events(listen: str, insecure: bool, answers: bool) -> None:
    async with facade(listen=listen, insecure=insecure) as (_, stub):
        call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest(load_records_before_first_batch=True))
        if answers:
            assert (await call.read()).HasField("load")
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value).code == "ADMIN_NEEDS_KEY"
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub.HealthCheck(vb.HealthCheckRequest())).healthy, "that tells nothing of tenants"


async def test_kv_events_require_the_admin_scope(tmp_path: Path) -> None:
    keys = {"a": "inference", "b": "admin", "c": "inference, admin"}
    entries = (
        f"- {{name: {key}, sha256: {hashlib.sha256(key.encode()).hexdigest()}, scopes: [{scopes}]}}\n"
        for key, scopes in keys.items()
    )
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n" + "".join(entries))
    async with facade(api_key=("p",), api_key_file=str(file)) as (_, stub):
        for key, enters in (("p", False), ("a", False), ("b", True), ("c", True)):
            asked = cb.SubscribeKvEventsRequest(load_records_before_first_batch=True)
            call = stub.SubscribeKvEvents(asked, metadata=(("authorization", f"Bearer {key}"),))
            if enters:
                assert (await call.read()).load.load_only
                call.cancel()
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, key


@pytest.mark.deep
async def test_non_reading_client_frees_its_admission() -> None:
    scheduler = PagedScheduler(step_s=0.005, tokens_per_step=10, max_model_len=1_000_000)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        facade(scheduler, client_stall_s=0.5) as (rig, _),
        grpc.aio.insecure_channel(rig.grpc_address, options) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(request(stream=True, sampling={"max_tokens": 900_000}))
        await until(lambda: rig.router.admission.inside == 1)
        await until(lambda: rig.router.admission.inside == 0 and nothing_left(rig))
        assert scheduler.aborts
        with pytest.raises(grpc.aio.AioRpcError, match="read nothing of its answer"):
            _ = [answer async for answer in call]


async def test_non_reading_subscriber_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it has a bound, and the scheduler is not watched for it any more."""
    monkeypatch.setattr(smg_servicer, "MOST_BYTES", 1_000_000)
    scheduler = PagedScheduler()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        facade(scheduler) as (rig, _),
        grpc.aio.insecure_channel(rig.grpc_address, options) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest())
        for number in range(1, 60):
            many = [stored(b"", *(bytes([n]) * 32 for n in range(250)), tokens=number) for _ in range(5)]
            scheduler.frames.put_nowait(pb.PageEvents(epoch=EPOCH, sequence=number, stored=many))
        await asyncio.wait_for(scheduler.left.wait(), 60)
        numbers: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                numbers.append((await call.read()).sequence_number)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "waited for this subscriber" in str(caught.value.details())
        assert numbers == [*range(1, len(numbers) + 1)] and len(numbers) < 59
        # It may begin anew.
        scheduler.frames = asyncio.Queue()
        scheduler.frames.put_nowait(pb.PageEvents(epoch=EPOCH, sequence=80, snapshot=True, snapshot_complete=True))
        again = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest())
        assert (await again.read()).sequence_number == 80
        again.cancel()


async def test_vllm_grpc_requires_exactly_one_scheduler() -> None:
    with pytest.raises(ConfigError, match="NOT_ONE_SCHEDULER"):
        async with router_rig([FakeScheduler(), FakeScheduler()], vllm_grpc=True):
            pass
