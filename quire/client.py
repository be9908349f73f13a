"""Client: a Quire by its gRPC address, for threads. AsyncClient is the same for asyncio."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import channel, wire
from quire.outputs import Delta, ModelCard, RequestOutput
from quire.prompts import ChatPrompt, Prompt, normalise
from quire.sampling_params import SamplingParams
from quire.v1 import inference_pb2, inference_pb2_grpc

_HEALTH_TIMEOUT_S = 5.0


class Client:
    """Thread-safe. Every failure is a `quire.QuireError` (code, message, fix, request id). Closes as a context."""

    def __init__(self, address: str, *, api_key: str | None = None, tls_ca: str | None = None) -> None:
        self.address = address
        self._metadata = channel.metadata(api_key)
        secure = channel.credentials(tls_ca)
        options = channel.options(address)
        if secure is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, secure, options)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = 0.0,
        return_token_ids: bool = False,
        return_timings: bool = False,
    ) -> Iterator[Delta]:
        """Stream a continuation. A caller that stops iterating (or closes the iterator) ends the request."""
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        request = wire.build_request(
            prompt,
            sampling_params or SamplingParams(),
            request_id=request_id,
            model=model,
            priority=priority,
            timeout_s=timeout_s,
            return_token_ids=return_token_ids,
            return_timings=return_timings,
        )
        return self._stream(request, request_id)

    def complete(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """The whole continuation at once; `options` are those of `generate`."""
        asked = normalise(prompt)
        output = RequestOutput(prompt=asked if isinstance(asked, str) else None)
        for delta in self.generate(prompt, sampling_params, return_token_ids=True, **options):
            output.add(delta)
        return output

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The answer to a conversation; `options` are those of `generate`."""
        return self.complete(ChatPrompt(messages), sampling_params, **options)

    def models(self) -> list[ModelCard]:
        """What is served."""
        try:
            answer = self._inference.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return [wire.read_model(model) for model in answer.models]

    def health(self, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Whether the router serves (grpc.health.v1). Raises Unavailable where nothing answers."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Ends what still runs."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: inference_pb2.GenerateRequest, request_id: str) -> Iterator[Delta]:
        call = self._inference.Generate(request, metadata=self._metadata)
        try:
            for response in call:
                yield wire.read_response(response, request_id)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address, request_id) from error
        finally:
            call.cancel()
