"""AsyncClient: the asyncio client of a Quire at a gRPC address. It has the same calls as Client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
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


class AsyncClient:
    """A client that belongs to the event loop in which it was made. In all other respects see Client."""

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
        self._closed = asyncio.Event()
        self._metadata = channel.metadata(api_key)
        secure, options = channel.credentials(tls_ca), channel.options(address, tls_server_name)
        aio = grpc.aio
        self._channel = (
            aio.insecure_channel(address, options) if secure is None else aio.secure_channel(address, secure, options)
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Delta]:
        """Return an iterator that sends the request when it is first read, and yields the pieces of the answer as they
        arrive. Raises InvalidArgument at once for a request that cannot be sent, such as one with an invalid prompt,
        tool choice or `timeout_s`; the iterator raises the other QuireErrors. If the connection breaks after the first
        piece, the answer continues over a new one. An answer that arrives as a whole (a beam search, the best of
        several) does not: the error is raised. Before the first piece, a call is sent again only if a draining router
        refused it, or gRPC cancelled it before a router began it. Closing the iterator ends the request."""
        return self._stream(GenerateCall(prompt, sampling_params, options, self.address, self._reconnect_s))

    async def complete(
        self, prompt: Prompt, sampling_params: Params | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestOutput:
        """Generate a continuation, and return the whole of it in one RequestOutput, token ids included. `options` are
        those of `generate`. Raises InvalidArgument for an invalid prompt, the router's QuireError if it refuses or
        fails the request, Unavailable if it cannot be reached, and Aborted if the client is closed."""
        options["return_token_ids"] = True
        asked = normalise(prompt)
        output = RequestOutput(prompt=asked if isinstance(asked, str) else None)
        async for delta in self.generate(prompt, sampling_params, **options):
            output.add(delta)
        return output

    async def chat(
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
        return await self.complete(prompt, sampling_params, **options)

    async def models(self) -> list[ModelCard]:
        """Ask the router for the models that it serves, and return their ModelCards. Raises the router's QuireError,
        such as Unauthenticated, and Unavailable if it cannot be reached. There is no time limit. On a closed client,
        gRPC's own exception passes on."""
        try:
            answer = await self._inference.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return [wire.read_model(model) for model in answer.models]

    async def health(self, timeout_s: float = channel.HEALTH_TIMEOUT_S) -> bool:
        """Whether the router serves, by grpc.health.v1; False if it answers anything but SERVING. Raises Unavailable if
        nothing answers, DeadlineExceeded after `timeout_s`, and the router's other QuireErrors. On a closed client,
        gRPC's own exception passes on."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await self._health.Check(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.read_error(error, self.address) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the connection. Answers that still run, or wait to be sent again, raise `Aborted`; `models` and
        `health`, if they still run, raise asyncio.CancelledError."""
        self._closed.set()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream(self, state: GenerateCall) -> AsyncIterator[Delta]:
        """Send the request of `state`, and yield the deltas of the answer. If a stream breaks or carries an error,
        `state` says how long to wait before another stream resumes the answer (or repeats a request that was not
        begun), or that the answer is complete, or raises the typed error. A complete answer whose stream broke before
        the router's usage came gets a last delta with the counted usage. Unfinished choices are resumed one after the
        other, each by a request of its own. If this iterator is closed, the call on the router is cancelled. Raises
        Aborted if the client is closed before the answer is complete."""
        while not self._closed.is_set():
            call = self._inference.Generate(state.request, metadata=self._metadata)
            try:
                async for response in call:
                    yield state.read(response)
            except (grpc.RpcError, QuireError) as error:
                begun = channel.has_begun(await call.initial_metadata())
                pause_s = state.wait_s(error, begun=begun, closed=self._closed.is_set())
                if pause_s is None:
                    break
                await self._pause(pause_s)
                continue
            except asyncio.CancelledError as error:
                if self._closed.is_set() and not _is_cancelled():
                    raise state.client_closed() from error  # gRPC cancels the calls of a channel that closes
                raise
            finally:
                call.cancel()
            if not state.more():
                return
        else:
            raise state.client_closed()
        if (last := state.last_delta()) is not None:
            yield last

    async def _pause(self, pause_s: float) -> None:
        """Wait for `pause_s` seconds, but no longer than until the client is closed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), pause_s)


def _is_cancelled() -> bool:
    """Whether the running task has been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
