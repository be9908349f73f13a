"""Targets: every RPC of the kvstore, tokenizer, scheduler and router, each by itself with fakes for its peers."""

from __future__ import annotations

import json
from concurrent import futures
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as smg_common
from smg_grpc_proto.generated import vllm_engine_pb2 as smg

from quire.v1 import common_pb2, inference_pb2, kvstore_pb2, scheduler_pb2, tokenizer_pb2
from quire_common.columns import pack_i32
from quire_common.sequence import RequestContext, context_to_pb, sequence_to_pb
from quire_common.telemetry.interceptors import aio_server_interceptors, sync_server_interceptors
from quire_common.transport import SERVER_OPTIONS
from quire_kvstore.server import KvstoreService, worker_threads
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.server import TokenizerService
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Stack, stack
from tests.fuzz.rpc_target import PLACEHOLDER, LoopThread, Method, RpcTarget, unary
from tests.fuzz.strict_tokenizer import StrictTokenizer
from tests.unit.kvstore.pages import BODY_BYTES, chain, config, framed
from tests.unit.tokenizer import folders

_CHAT = json.dumps([{"role": "user", "content": "Hello <|im_end|>"}, {"role": "assistant", "content": "Yes"}])


class KvstoreTarget(RpcTarget):
    """KvStore. Its integrity is checked after every 64th call, and at the end."""

    covers = (
        "kvstore/quire_kvstore/servicer.py",
        "kvstore/quire_kvstore/page_store.py",
        "kvstore/quire_kvstore/leases.py",
        "kvstore/quire_kvstore/put_manager.py",
        "kvstore/quire_kvstore/puts.py",
    )

    def serve(self) -> str:
        settings = config(64, sweep_s=0.05, max_leases=4096)
        service = KvstoreService(settings)
        pool = self.closing.enter_context(futures.ThreadPoolExecutor(worker_threads(settings)))
        server = grpc.server(pool, interceptors=sync_server_interceptors(), options=SERVER_OPTIONS)
        service.register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        service.start()
        self.closing.callback(service.close)
        self.closing.callback(service.store.check_integrity)
        self.closing.callback(lambda: server.stop(5).wait())
        self.closing.callback(lambda: service.drain(10))
        self._store, self._calls = service.store, 0
        return f"127.0.0.1:{port}"

    def settle(self) -> None:
        self._calls += 1
        if self._calls % 64 == 0:
            self._store.check_integrity()

    def make_methods(self) -> tuple[Method, ...]:
        run = chain("fuzz", 3)
        keys = kvstore_pb2.PageKeys(namespace=run.namespace, group=run.group, hashes=run.hashes)
        page = framed(run, 0)
        pb = kvstore_pb2
        frames = (pb.PutFrame(lease=PLACEHOLDER, data=page[:500]), pb.PutFrame(offset=500, data=page[500:]))
        watch = common_pb2.WatchPagesRequest
        return (
            unary(
                "KvStore",
                "LookupAndPin",
                pb.LookupAndPinRequest(keys=keys, lease_ms=1000, direct=True),
                pb.LookupAndPinResponse,
            ),
            unary(
                "KvStore",
                "BeginPut",
                pb.BeginPutRequest(keys=keys, page_bytes=BODY_BYTES, lease_ms=1000),
                pb.BeginPutResponse,
            ),
            Method("/quire.v1.KvStore/Put", pb.PutFrame, pb.PutResponse, (frames,), streams_in=True),
            unary("KvStore", "CommitPut", pb.CommitPutRequest(lease=PLACEHOLDER), pb.CommitPutResponse),
            Method(
                "/quire.v1.KvStore/Get",
                pb.GetRequest,
                pb.GetFrame,
                ((pb.GetRequest(lease=PLACEHOLDER, pages=pack_i32([0])),),),
                streams_out=True,
            ),
            unary("KvStore", "Attach", pb.AttachRequest(lease=PLACEHOLDER), pb.AttachResponse),
            unary("KvStore", "Check", pb.CheckRequest(lease=PLACEHOLDER, page=0), pb.CheckResponse),
            unary("KvStore", "Renew", pb.RenewRequest(lease=PLACEHOLDER, lease_ms=500), pb.RenewResponse),
            unary("KvStore", "Release", pb.ReleaseRequest(leases=[PLACEHOLDER]), pb.ReleaseResponse),
            Method(
                "/quire.v1.KvStore/Watch", watch, common_pb2.PageEvents, ((watch(),),), streams_out=True, lasts=True
            ),
            unary("KvStore", "Stats", pb.StatsRequest(), pb.StatsResponse),
        )


class TokenizerTarget(RpcTarget):
    """Tokenizer, with templates of requests allowed."""

    covers = (
        "tokenizer/quire_tokenizer/servicer.py",
        "tokenizer/quire_tokenizer/codec.py",
        "tokenizer/quire_tokenizer/text_service.py",
        "tokenizer/quire_tokenizer/tokenize_stream.py",
        "tokenizer/quire_tokenizer/chat",
        "tokenizer/quire_tokenizer/detokenize",
    )

    def serve(self) -> str:
        loop = self.closing.enter_context(LoopThread())
        folder = folders.write_folder(self.folder / "tiny")
        options: dict[str, Any] = {"allow_request_chat_template": True, "render_timeout_s": 2.0}

        async def start() -> tuple[TokenizerService, grpc.aio.Server, int]:
            service = TokenizerService(TokenizerConfig(model=str(folder), **options))
            server = grpc.aio.server(interceptors=aio_server_interceptors(), options=SERVER_OPTIONS)
            service.register(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            await service.start()
            return service, server, port

        service, server, port = loop.run(start())
        self.closing.callback(lambda: loop.run(service.close()))
        self.closing.callback(lambda: loop.run(server.stop(0)))
        return f"127.0.0.1:{port}"

    def make_methods(self) -> tuple[Method, ...]:
        pb = tokenizer_pb2
        ids = pack_i32([50, 60, 70, 6])
        render = pb.RenderChatRequest(
            messages_json=_CHAT, add_generation_prompt=True, template_kwargs_json='{"a": 1}', max_tokens=99
        )
        own = pb.RenderChatRequest(messages_json=_CHAT, chat_template="{{ messages[0].content }}", tools_json="[]")
        encode = pb.EncodeRequest(texts=["the dog <s>", "é"], add_special_tokens=True, max_tokens=100)
        opens = pb.DetokenizeRequest(
            open=[pb.DetokenizeOpen(handle=1, stop=["og"], want_offsets=True, prior_ids=ids, chars_sent=2)]
        )
        rows = pb.DetokenizeRequest(handle=pack_i32([1]), count=pack_i32([2]), token=pack_i32([50, 60]), finish=b"\1")
        schema = '{"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "$defs": {"x": {"pattern": "^a+$"}}}'
        compiled = pb.CompileGrammarRequest(
            constraint=common_pb2.Constraint(kind="json_schema", text=schema, disable_additional_properties=True),
            reasoning=True,
        )
        works = (
            pb.TokenizeRequest(id=1, encode=encode),
            pb.TokenizeRequest(id=3, compile=compiled),
            pb.TokenizeRequest(id=2, render=render),
            pb.TokenizeRequest(id=2, cancel=True),
        )
        return (
            unary("Tokenizer", "Encode", encode, pb.EncodeResponse),
            Method("/quire.v1.Tokenizer/RenderChat", pb.RenderChatRequest, pb.RenderChatResponse, ((render,), (own,))),
            Method(
                "/quire.v1.Tokenizer/Tokenize",
                pb.TokenizeRequest,
                pb.TokenizeResponse,
                (works,),
                streams_in=True,
                streams_out=True,
            ),
            Method(
                "/quire.v1.Tokenizer/Detokenize",
                pb.DetokenizeRequest,
                pb.DetokenizeResponse,
                ((opens, rows),),
                streams_in=True,
                streams_out=True,
            ),
            unary(
                "Tokenizer",
                "Decode",
                pb.DecodeRequest(token_ids=[ids, b""], skip_special_tokens=True),
                pb.DecodeResponse,
            ),
            unary("Tokenizer", "CompileGrammar", compiled, pb.CompileGrammarResponse),
            unary("Tokenizer", "GetTokenBytes", pb.GetTokenBytesRequest(token_ids=ids), pb.GetTokenBytesResponse),
            unary("Tokenizer", "GetTokenizerInfo", pb.GetTokenizerInfoRequest(), pb.GetTokenizerInfoResponse),
        )


class SchedulerTarget(RpcTarget):
    """Scheduler, with a fake worker. Drain is left out: a scheduler that drains takes nothing more."""

    covers = (
        "scheduler/quire_scheduler/servicer.py",
        "scheduler/quire_scheduler/service/session.py",
        "scheduler/quire_scheduler/service/session_wire.py",
        "scheduler/quire_scheduler/service/single_stream.py",
        "scheduler/quire_scheduler/core",
        "common/quire_common/sequence.py",
        "common/quire_common/ticket.py",
    )
    call_s = 60.0

    def serve(self) -> str:
        loop = self.closing.enter_context(LoopThread())
        self._scheduler: Stack = loop.enter(stack(seqs=8))
        return self._scheduler.address

    def settle(self) -> None:
        worker = self._scheduler.worker
        if self._scheduler.core is None or worker.worker is None:
            raise AssertionError("the worker was lost")
        # The fake worker keeps what it is sent, which would look like a leak of the scheduler.
        worker.contexts.clear()
        worker.worker.seen.clear()

    def make_methods(self) -> tuple[Method, ...]:
        pb = scheduler_pb2
        sequence = sequence_to_pb(a_sequence(6, 4, logprobs=2, stop_token_ids=(3,)))
        context = context_to_pb(RequestContext("fuzz"))
        ticket = pb.Ticket(
            transfer_id=b"t" * 16, instance="a", page_hashes=[b"h" * 32], lease_key=b"k" * 32, lease_ms=100
        )
        hello = pb.SessionRequest(hello=pb.SessionHello(protocol_version=1, router_id="r"))
        submit = pb.SessionRequest(submit=[pb.Submit(handle=1, context=context, sequence=sequence, held_tokens=4)])
        prefill = pb.Submit(
            handle=2, context=context, sequence=sequence, transfer=pb.KvTransfer(prefill_only=True, lease_ms=100)
        )
        await_it = pb.Submit(handle=3, context=context, sequence=sequence, transfer=pb.KvTransfer(await_handover=True))
        hand = pb.SessionRequest(
            handover=[pb.Handover(handle=3, ticket=ticket, token=pack_i32([5]), give_up=True)],
            renew_transfer=[b"t" * 16],
            release_transfer=[b"t" * 16],
        )
        end = pb.SessionRequest(abort=pack_i32([1, 2, 3]))
        generate = pb.GenerateTokensRequest(context=context, sequence=sequence)
        watch = common_pb2.WatchPagesRequest
        sessions = ((hello, submit, end), (hello, pb.SessionRequest(submit=[prefill, await_it]), hand, end))
        return (
            Method(
                "/quire.v1.Scheduler/Session",
                pb.SessionRequest,
                pb.SessionResponse,
                sessions,
                streams_in=True,
                streams_out=True,
            ),
            Method(
                "/quire.v1.Scheduler/GenerateTokens",
                pb.GenerateTokensRequest,
                pb.GenerateTokensResponse,
                ((generate,),),
                streams_out=True,
            ),
            unary("Scheduler", "GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse),
            Method(
                "/quire.v1.Scheduler/WatchLoad",
                pb.WatchLoadRequest,
                pb.Load,
                ((pb.WatchLoadRequest(interval_ms=10),),),
                streams_out=True,
                lasts=True,
            ),
            Method(
                "/quire.v1.Scheduler/WatchPages",
                watch,
                common_pb2.PageEvents,
                ((watch(),), (watch(with_token_ids=True),)),
                streams_out=True,
                lasts=True,
            ),
            unary("Scheduler", "GetTicket", pb.GetTicketRequest(transfer_id=b"t" * 16), pb.GetTicketResponse),
            unary("Scheduler", "SetRole", pb.SetRoleRequest(role="both"), pb.SetRoleResponse),
        )


class InferenceTarget(RpcTarget):
    """The router's two public services, with fakes behind it."""

    covers = ("router/quire_router/front/grpc", "router/quire_router/servicer.py", "router/quire_router/requests")

    def serve(self) -> str:
        loop = self.closing.enter_context(LoopThread())
        rig = loop.enter(router_rig([FakeScheduler(max_model_len=64)], [StrictTokenizer()], max_n=4, vllm_grpc=True))
        return rig.grpc_address

    def make_methods(self) -> tuple[Method, ...]:
        pb = inference_pb2
        sampling = common_pb2.SamplingParams(temperature=0.5, top_p=0.9, seed=3)
        text = pb.GenerateRequest(model="fake", text="abc", max_tokens=3, n=2, stop=["z"], sampling=sampling, best_of=3)
        ids = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=pack_i32([97, 98])),
            max_tokens=2,
            return_token_ids=True,
            stop_token_ids=pack_i32([5]),
            thinking_token_budget=5,
            truncate_prompt_tokens=1,
        )
        chat = pb.GenerateRequest(chat=pb.Chat(messages_json=_CHAT), max_tokens=2, bad_words=["x"], timeout_ms=5000)
        beams = pb.GenerateRequest(text="a", n=2, max_tokens=2, beam_search=pb.BeamSearch(length_penalty=1.0))
        resumed = pb.GenerateRequest(
            text="abc", max_tokens=4, resume=pb.Resume(output_ids=pack_i32([97]), characters=1)
        )
        tokenized = smg.TokenizedInput(input_ids=[97, 98])
        asked = smg.GenerateRequest(
            request_id="r",
            tokenized=tokenized,
            stream=True,
            sampling_params=smg.SamplingParams(temperature=0.0, max_tokens=2, n=2, logprobs=1, stop=["z"]),
        )
        return (
            Method(
                "/quire.v1.Inference/Generate",
                pb.GenerateRequest,
                pb.GenerateResponse,
                ((text,), (ids,), (chat,), (beams,), (resumed,)),
                streams_out=True,
            ),
            unary("Inference", "ListModels", pb.ListModelsRequest(), pb.ListModelsResponse),
            Method(
                "/vllm.grpc.engine.VllmEngine/Generate",
                smg.GenerateRequest,
                smg.GenerateResponse,
                ((asked,),),
                streams_out=True,
            ),
            *(
                Method(f"/vllm.grpc.engine.VllmEngine/{name}", request, answer, ((request(),),))
                for name, request, answer in (
                    ("HealthCheck", smg.HealthCheckRequest, smg.HealthCheckResponse),
                    ("Abort", smg.AbortRequest, smg.AbortResponse),
                    ("GetModelInfo", smg.GetModelInfoRequest, smg.GetModelInfoResponse),
                    ("GetServerInfo", smg.GetServerInfoRequest, smg.GetServerInfoResponse),
                )
            ),
            Method(
                "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
                smg_common.SubscribeKvEventsRequest,
                smg_common.KvEventBatch,
                ((smg_common.SubscribeKvEventsRequest(),),),
                streams_out=True,
                lasts=True,
            ),
        )
