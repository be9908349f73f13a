"""A router in this process that answers Inference by rule: it counts, fails or hangs as the prompt says."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """`requests` are those it saw; `overload` is how many it still turns away; `cancelled` is set at a cancellation."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = threading.Event()
        self.overload = 0
        self.sampling_defaults = common_pb2.SamplingDefaults()
        # The next calls are refused before they begin: with a code of ours, or as a port that closes cancels them
        # (CANCELLED). With CANCELLED_LATER, one ends so that has begun.
        self.refusals: list[str] = []
        # After so many responses each, the next streams break.
        self.breaks: list[int] = []
        # What a resumed stream breaks with: a code of ours; empty: as a connection does.
        self.breaks_with = ""
        # The usage comes in a response of its own, after the last token.
        self.usage_apart = False
        self.running, self.most_running = 0, 0
        self.together = threading.Barrier(1)
        self._lock = threading.Lock()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        with self._lock:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            turned_away = self.overload > 0
            self.overload -= turned_away
        if turned_away:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_ms=10)
        refusal = self.refusals.pop(0) if self.refusals else ""
        if refusal == "CANCELLED_LATER":
            context.send_initial_metadata((("x-request-id", request.request_id),))
            time.sleep(0.2)  # gRPC's asyncio client may lose metadata that the status follows at once
        if refusal.startswith("CANCELLED"):
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        if refusal:
            abort(context, grpc.StatusCode.UNAVAILABLE, refusal)
        if request.text == "fail":
            abort(context, grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        if request.text == "plain":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if request.text.startswith("hang"):
            context.add_callback(self.cancelled.set)
        if request.text == "hang at once":
            self.cancelled.wait(60)
            return
        if request.text == "hang":
            yield inference_pb2.GenerateResponse(request_id=request.request_id, text="x")
            self.cancelled.wait(60)
            return
        self.together.wait(60)
        broken_after = self.breaks.pop(0) if self.breaks else None
        responses = (response for index in range(request.n) for response in self._count(request, index))
        number = -1
        for number, response in enumerate(responses):
            if number == broken_after and self.breaks_with and request.HasField("resume"):
                abort(context, grpc.StatusCode.UNAVAILABLE, self.breaks_with)
            if number == broken_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield response
        if number + 1 == broken_after:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def _count(self, request: inference_pb2.GenerateRequest, index: int) -> Iterator[inference_pb2.GenerateResponse]:
        for token in range(len(request.resume.output_ids) // 4, request.max_tokens or 16):
            if request.text == "fail later" and token == 2:
                error = common_pb2.RequestError(
                    code="ENGINE_LOST", message="lost", fix="retry", grpc_code=grpc.StatusCode.UNAVAILABLE.value[0]
                )
                yield inference_pb2.GenerateResponse(request_id=request.request_id, index=index, error=error)
                return
            last = token == (request.max_tokens or 16) - 1
            response = inference_pb2.GenerateResponse(request_id=request.request_id, index=index, text=f"{token} ")
            if request.return_token_ids:
                response.token_ids = struct.pack("<i", token)
                if token == 0 and index == 0:
                    response.prompt_token_ids = struct.pack("<2i", 7, -8)
            if request.sampling.HasField("logprobs"):
                response.logprobs.append(
                    inference_pb2.TokenLogprob(
                        token_id=token,
                        token=b"\xff",
                        logprob=-0.5,
                        rank=1,
                        top=[inference_pb2.TopLogprob(token_id=99, token=b"b", logprob=-1.0)],
                    )
                )
            if last:
                response.finish_reason = common_pb2.FINISH_REASON_LENGTH
                if index == request.n - 1:
                    if self.usage_apart:
                        yield response
                        response = inference_pb2.GenerateResponse(request_id=request.request_id, index=index)
                    response.usage.CopyFrom(common_pb2.Usage(prompt_tokens=2, completion_tokens=token + 1))
                    if request.return_timings:
                        response.timings.append(common_pb2.HopTiming(service="worker", phase="decode", us=5, count=1))
            yield response

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        model = common_pb2.ModelInfo(name="fake", vocab_size=100, sampling_defaults=self.sampling_defaults)
        return inference_pb2.ListModelsResponse(models=[model])


def abort(context: grpc.ServicerContext, status: grpc.StatusCode, code: str, retry_ms: int = 0) -> None:
    details = [error_details_pb2.ErrorInfo(reason=code, domain="quire", metadata={"fix": "do better", "param": "p"})]
    rich = status_pb2.Status(code=status.value[0], message=f"the message of {code}")
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        rich.details.append(packed)
    if retry_ms:
        retry, packed = error_details_pb2.RetryInfo(), any_pb2.Any()
        retry.retry_delay.FromMilliseconds(retry_ms)
        packed.Pack(retry)
        rich.details.append(packed)
    context.abort_with_status(rpc_status.to_status(rich))


@contextmanager
def serve_fake_router(threads: int = 16) -> Iterator[tuple[FakeRouter, str]]:
    """The router and its address."""
    router, checker = FakeRouter(), health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(threads))
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    checker.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
