"""The Scheduler contract over real gRPC, with a fake worker behind it."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from quire.v1 import common_pb2, scheduler_pb2
from quire_common.columns import i32
from quire_common.errors import ConfigError, from_rpc_error
from quire_common.sequence import RequestContext, context_to_pb, sequence_to_pb
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import LIMIT_S, Router, Stack, stack
from tests.fakes.worker.fake_worker import undisturbed
from tests.fakes.worker.fake_worker_service import FakeWorkerService


async def test_a_session_runs_many_requests() -> None:
    async with stack(seqs=4) as s:
        router = Router(s)
        welcome = await router.open()
        assert (welcome.protocol_version, welcome.epoch.run) == (1, 1)
        sequences = {h: a_sequence(3 + h, 4 + h % 5, logprobs=1 if h % 2 else -1) for h in range(12)}
        await router.submit(sequences)
        await router.done(*sequences)
        for handle, sequence in sequences.items():
            assert router.tokens[handle] == undisturbed(sequence)[0]
            assert router.finish[handle] == common_pb2.FINISH_REASON_LENGTH
            note = router.finished[handle]
            assert note.usage.prompt_tokens == 3 + handle
            assert note.usage.completion_tokens == 4 + handle % 5
            phases = {(t.service, t.phase): t.count for t in note.timings}
            assert phases["scheduler", "queue"] == 1
            assert phases["worker", "prefill"] == 3 + handle
            assert phases["worker", "decode"] == 3 + handle % 5
        await router.half_close()
        await s.until_quiet()


async def test_half_closed_session_lets_its_requests_finish() -> None:
    async with stack() as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(5, 20)})
        await router.half_close()
        assert router.tokens[1] == undisturbed(a_sequence(5, 20))[0]


async def test_stop_token_is_reported() -> None:
    sequence = a_sequence(6, 30)
    third = undisturbed(sequence)[0][2]
    async with stack() as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(6, 30, stop_token_ids=(third,))})
        await router.done(1)
        assert router.finish[1] == common_pb2.FINISH_REASON_STOP
        assert router.finished[1].stop_token_id == third == router.tokens[1][-1]


async def test_bad_requests_fail_alone() -> None:
    async with stack(max_model_len=64) as s:
        router = Router(s)
        await router.open()
        bad = {1: a_sequence(64), 2: a_sequence([5, 1000]), 3: a_sequence(4, 0), 4: a_sequence([])}
        await router.submit({**bad, 5: a_sequence(4, 4)})
        await router.done(1, 2, 3, 4, 5)
        codes = {handle: error.code for handle, error in router.failed.items()}
        assert codes == {1: "PROMPT_TOO_LONG", 2: "BAD_TOKEN_ID", 3: "BAD_MAX_TOKENS", 4: "EMPTY_PROMPT"}
        assert all(error.fix for error in router.failed.values())
        assert router.tokens[5] == undisturbed(a_sequence(4, 4))[0]


async def test_request_too_large_for_a_grant_fails_alone() -> None:
    """Together such requests would make a Grant or a Report that gRPC refuses, and so cost all others their run."""
    async with stack() as s:
        router = Router(s)
        await router.open()
        ids = tuple(range(2, 1027))
        bad = {
            1: a_sequence(4, 4, stop_token_ids=ids),
            2: a_sequence(4, 4, cache_salt="s" * 5000),
            3: a_sequence(4, 4, logprobs=1000),
        }
        await router.submit({**bad, 5: a_sequence(4, 4, stop_token_ids=ids[-1024:], logprobs=256)})
        await router.submit({4: a_sequence(4, 4)}, tenant="t" * 5000)
        await router.done(1, 2, 3, 4, 5)
        codes = {handle: error.code for handle, error in router.failed.items()}
        assert codes == {
            1: "TOO_MANY_STOP_IDS",
            2: "TEXT_TOO_LONG",
            3: "TOO_MANY_LOGPROBS",
            4: "TEXT_TOO_LONG",
        }
        assert all(error.fix for error in router.failed.values())


async def test_full_queue_refuses_with_retry_advice() -> None:
    async with stack(seqs=1, max_waiting=2) as s:
        s.worker.answering.clear()
        router = Router(s)
        await router.open()
        await router.submit({h: a_sequence(4, 4) for h in range(6)})
        await router.until(lambda: len(router.failed) == 4)
        error = next(iter(router.failed.values()))
        assert (error.code, error.http_status) == ("QUEUE_FULL", 429)
        assert error.retry_after_s >= 1
        s.worker.answering.set()
        await router.done(*range(6))


async def test_aborted_request_gets_a_final_row_and_frees_its_pages() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.002
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(8, 200), 2: a_sequence(8, 6)})
        await router.until(lambda: len(router.tokens.get(1, ())) > 3)
        await router.abort(1, 99)
        await router.done(1, 2)
        assert router.finish[1] == common_pb2.FINISH_REASON_ABORT
        assert router.finished[1].usage.completion_tokens == len(router.tokens[1]) < 200
        assert router.tokens[1] == undisturbed(a_sequence(8, 200))[0][: len(router.tokens[1])]
        await s.until_quiet()


async def test_cancelled_sessions_release_every_page() -> None:
    async with stack(seqs=32, num_pages=2000, max_waiting=1000) as s:
        s.worker.step_s = 0.02
        sessions = [Router(s) for _ in range(10)]
        for router in sessions:
            await router.open()
            await router.submit({h: a_sequence(20 + h, 200) for h in range(20)})
        await s.until(lambda: (s.core.load().running, s.core.load().waiting) == (32, 168))
        assert s.core.load().referenced_pages > 0
        for router in sessions:
            router.cancel()
        await s.until_quiet()
        assert s.core.stats.finished == {"abort": 200}


async def test_deadlines_pass_while_waiting_and_while_running() -> None:
    async with stack(seqs=1, max_model_len=256) as s:
        s.worker.step_s = 0.02
        router = Router(s)
        await router.open()
        soon = time.monotonic() + 2.0  # less than the first would run
        await router.submit({1: a_sequence(8, 240), 2: a_sequence(8, 240)}, deadline_s=soon)
        await router.submit({3: a_sequence(8, 4)}, deadline_s=0.0)
        await router.done(1, 2, 3)
        assert {e.code for e in router.failed.values()} == {"DEADLINE_EXCEEDED"}
        assert len(router.tokens[1]) > 0
        await s.until_quiet()


async def test_load_is_watched_from_loading_on() -> None:
    async with stack(ready=False, prepare=lambda w: w.may_load.clear()) as s:
        watch = s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=10))
        async with asyncio.timeout(LIMIT_S):
            while (load := await watch.read()).detail != "weights model.safetensors":
                assert load.phase == "loading"
            assert load.progress == 0.25
            with pytest.raises(grpc.RpcError) as refused:
                await s.stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest())
            assert from_rpc_error(refused.value).code == "WORKER_NOT_READY"
            s.worker.may_load.set()
            while (load := await watch.read()).phase != "ready":
                pass
            assert (load.instance, load.max_num_seqs, load.pages) == ("scheduler-test", 4, 64)
            s.worker.answering.clear()
            router = Router(s)
            await router.open()
            await router.submit({h: a_sequence(9, 4) for h in range(6)})
            while (load := await watch.read()).waiting != 2:
                pass
            assert (load.running, load.referenced_pages, load.waiting_prefill_tokens) == (4, 18, 54)
            s.worker.answering.set()
            await router.done(*range(6))
        watch.cancel()


async def test_failed_model_load_names_its_cause() -> None:
    def prepare(worker: FakeWorkerService) -> None:
        worker.load_error = ConfigError("SHARD_MISSING", "model-2.safetensors is missing.", "Fetch it.")

    async with stack(ready=False, prepare=prepare) as s:
        watch = s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=10))
        async with asyncio.timeout(LIMIT_S):
            while (load := await watch.read()).phase != "failed":
                pass
        assert load.detail == "SHARD_MISSING: model-2.safetensors is missing."
        watch.cancel()


async def test_generate_serves_one_request_per_call() -> None:
    async with stack() as s:
        sequence = a_sequence(7, 9, logprobs=1)
        request = scheduler_pb2.GenerateTokensRequest(
            context=context_to_pb(RequestContext("one")), sequence=sequence_to_pb(sequence)
        )
        tokens: list[int] = []
        async for message in s.stub.GenerateTokens(request):
            tokens += i32(message.token).tolist()
            assert len(i32(message.logprobs.token_index)) == len(i32(message.token))
        assert tokens == undisturbed(sequence)[0]
        assert message.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert message.finished.usage.completion_tokens == 9
        request.sequence.stop.max_tokens = 0
        with pytest.raises(grpc.RpcError) as refused:
            await s.stub.GenerateTokens(request).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(refused.value).code == "BAD_MAX_TOKENS"


async def test_model_info_tells_the_context_that_pages_allow() -> None:
    async with stack(num_pages=11, page_size=4, max_model_len=256) as s:
        info = await s.stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest())
        assert (info.model.max_model_len, info.role, info.instance) == (40, "both", "scheduler-test")
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(40), 2: a_sequence(8, 200)})
        await router.done(1, 2)
        assert router.failed[1].code == "PROMPT_EXCEEDS_PAGES"
        assert len(router.tokens[2]) == 32


async def test_drain_refuses_new_requests_and_finishes_admitted_ones() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.002
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 20)})
        await router.until(lambda: 1 in router.tokens)
        drain = asyncio.ensure_future(_drain(s, 0))
        await s.until(lambda: bool(s.engine.draining))
        await router.submit({2: a_sequence(4, 4)})
        await router.done(1, 2)
        assert router.failed[2].code == "DRAINING"
        assert router.tokens[1] == undisturbed(a_sequence(4, 20))[0]
        assert await drain == 0
        load = await s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest()).read()
        assert load.phase == "draining"


async def test_drain_aborts_requests_after_its_timeout() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.02
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(4, 240), 2: a_sequence(4, 240)})
        await router.until(lambda: len(router.tokens) == 2)
        assert await _drain(s, 50) == 2
        await router.done(1, 2)
        assert {e.code for e in router.failed.values()} == {"DRAINING"}


async def test_pages_are_watched_by_snapshot_and_tail() -> None:
    async with stack(page_size=4, max_model_len=256, num_pages=12, enable_prefix_caching=True) as s:
        s.worker.step_s = 0.002
        router = Router(s)
        await router.open()
        tail = s.stub.WatchPages(common_pb2.WatchPagesRequest(with_token_ids=True))
        async with asyncio.timeout(LIMIT_S):
            empty = await tail.read()
            assert empty.snapshot and empty.snapshot_complete and not empty.stored
            await router.submit({1: a_sequence(10, 30)})
            event = await tail.read()
            (chain,) = event.stored
            assert (len(chain.hashes), chain.parent, chain.medium, chain.namespace) == (2, b"", "device", b"ns")
            assert i32(chain.token_ids).tolist() == a_sequence(10).prompt_ids[:8].tolist()
            late = s.stub.WatchPages(common_pb2.WatchPagesRequest())
            snapshot = await late.read()
            assert snapshot.snapshot_complete and list(snapshot.stored[0].hashes) == list(chain.hashes)
            assert not snapshot.stored[0].token_ids
            await router.abort(1)
            # They stay until another needs all pages.
            await router.submit({2: a_sequence(36, 6, cache_salt="other")})
            removed: set[bytes] = set()
            while removed != set(chain.hashes):
                removed |= set((await tail.read()).removed) & set(chain.hashes)
            resumed = s.stub.WatchPages(common_pb2.WatchPagesRequest(epoch=event.epoch, after_sequence=event.sequence))
            again = await resumed.read()
            # One frame may hold several changes; none of them is missing.
            assert not again.snapshot and (again.first_sequence or again.sequence) == event.sequence + 1
        for call in (tail, late, resumed):
            call.cancel()


async def test_a_session_without_hello_or_of_another_version_is_refused() -> None:
    async with stack() as s:
        router = Router(s)
        await router.submit({1: a_sequence(4)})
        assert (await router.status()).code == "HELLO_MISSING"
        call = s.stub.Session()
        await call.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=9)))
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()
        assert from_rpc_error(refused.value).code == "PROTOCOL_VERSION"


async def _drain(s: Stack, timeout_ms: int) -> int:
    response = await s.stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=timeout_ms), timeout=LIMIT_S)
    return int(response.aborted)
