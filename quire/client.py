"""Client: the client of a Quire at a gRPC address, for threads. AsyncClient is the client for asyncio."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import channel, wire
from quire.errors import QuireError
from quire.generate_call import GenerateCall, GenerateOptions, Params
from quire.outputs import Delta, ModelCard, RequestOutput
from quire.prompts import ChatPrompt, Prompt, normalise
from quire.v1 import inference_pb2, inference_pb2_grpc


class Client:
    """A thread-safe client. Every failure is a `quire.QuireError` (code, message, fix, request id), but `models` and
    `health` of a closed client raise gRPC's own exception. A `with` block closes the client.

    If a stream breaks in the middle, it continues over a new connection; the client tries for `reconnect_s` without
    progress. `tls_ca` is the PEM file of the authority that signed the router's certificate, and turns TLS on; a file
    that cannot be read raises NotFound. `tls_server_name` is the name in that certificate, if it is not the host of the
    address.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        tls_server_name: str | None = None,
        reconnect_s: float = channel.RECONNECT_S,
    ) -> None:
        self.address = address
        self._reconnect_s = reconnect_s
        self._closed = threading.Event()
        self._metadata = channel.metadata(api_key)
        secure, options = channel.credentials(tls_ca), channel.options(address, tls_server_name)
        self._channel = (
            grpc.insecure_channel(address, options) if secure is None else grpc.secure_channel(address, secure, options)
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta]:
        """Return an iterator that sends the request when it is first read, and yields the pieces of the answer as they
        arrive. Raises InvalidArgument at once for a request that cannot be sent, such as one with an invalid prompt,
        tool choice or `timeout_s`; the iterator raises the other QuireErrors. If the connection breaks after the first
        piece, the answer continues over a new one. An answer that arrives as a whole (a beam search, the best of
        several) does not: the error is raised. Before the first piece, a call is sent again only if a draining router
        refused it, or gRPC cancelled it before a router began it. The request ends if the iterator is closed or
        dropped."""
        return self._stream(GenerateCall(prompt, sampling_params, options, self.address, self._reconnect_s))

    def complete(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestOutput:
        """Generate a continuation, and return the whole of it in one RequestOutput, token ids included. `options` are
        those of `generate`. Raises InvalidArgument for an invalid prompt, the router's QuireError if it refuses or
        fails the request, Unavailable if it cannot be reached, and Aborted if the client is closed."""
        options["return_token_ids"] = True
        asked = normalise(prompt)
        output = RequestOutput(prompt=asked if isinstance(asked, str) else None)
        for delta in self.generate(prompt, sampling_params, **options):
            output.add(delta)
        return output

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        separate: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestOutput:
        """Return the answer to a conversation. The tools and the choice among them have OpenAI's form. `separate`:
        whether reasoning and tool calls come apart from the text; None: if there are tools. `options` are those of
        `generate`. Raises the QuireErrors of `complete`, and InvalidArgument for a bad tool choice."""
        prompt = ChatPrompt(
            messages,
            tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            separate=bool(tools) if separate is None else separate,
        )
        return self.complete(prompt, sampling_params, **options)

    def models(self) -> list[ModelCard]:
        """Ask the router for the models that it serves, and return their ModelCards. Raises the router's QuireError,
        such as Unauthenticated, and Unavailable if it cannot be reached. There is no time limit. On a closed client,
        gRPC's own exception passes on."""
        try:
            answer = self._inference.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return [wire.read_model(model) for model in answer.models]

    def health(self, timeout_s: float = channel.HEALTH_TIMEOUT_S) -> bool:
        """Whether the router serves, by grpc.health.v1; False if it answers anything but SERVING. Raises Unavailable if
        nothing answers, DeadlineExceeded after `timeout_s`, and the router's other QuireErrors. On a closed client,
        gRPC's own exception passes on."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection. Calls that still run, or wait to be sent again, raise `Aborted`."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, state: GenerateCall) -> Iterator[Delta]:
        """Send the request of `state`, and yield the deltas of the answer. If a stream breaks or carries an error,
        `state` says how long to wait before another stream resumes the answer (or repeats a request that was not
        begun), or that the answer is complete, or raises the typed error. A complete answer whose stream broke before
        the router's usage came gets a last delta with the counted usage. Unfinished choices are resumed one after the
        other, each by a request of its own. If this iterator is closed, the call on the router is cancelled. Raises
        Aborted if the client is closed before the answer is complete."""
        while True:
            try:
                call = self._inference.Generate(state.request, metadata=self._metadata)
            except ValueError as error:  # of gRPC, where the channel is closed
                if self._closed.is_set():
                    raise state.client_closed() from error
                raise
            try:
                for response in call:
                    yield state.read(response)
            except (grpc.RpcError, QuireError) as error:
                begun = channel.has_begun(call.initial_metadata())
                pause_s = state.wait_s(error, begun=begun, closed=self._closed.is_set())
                if pause_s is None:
                    break
                if self._closed.wait(pause_s):
                    raise state.client_closed() from error
                continue
            finally:
                call.cancel()
            if not state.more():
                return
        if (last := state.last_delta()) is not None:
            yield last
