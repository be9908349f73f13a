"""Calls of the public gRPC port with fields at their bounds, made from the contract's descriptors."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import inference_pb2, inference_pb2_grpc

Call = Callable[[grpc.aio.Channel, tuple[tuple[str, str], ...]], Any]
_RNG = random.Random(5)
_REPEATED = {"stop": (64, 512), "bad_words": (200, 16)}
# As the router's checks have them; other numbers are the largest of their type.
_MOST: dict[str, float] = {
    "n": 128,
    "best_of": 128,
    "max_tokens": 64,
    "min_tokens": 64,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "length_penalty": 10,
    "max_pattern_size": 512,
    "min_pattern_size": 256,
    "min_count": 120,
    "truncate_prompt_tokens": 1000,
    "timeout_ms": 60_000,
    "temperature": 100,
    "top_p": 1,
    "min_p": 1,
    "typical_p": 1,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "repetition_penalty": 2,
}
_ENDS = {
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_FLOAT: 3.4e38,
    FieldDescriptor.CPPTYPE_DOUBLE: 1e308,
    FieldDescriptor.CPPTYPE_BOOL: True,
}
METHODS = (
    "/quire.v1.Inference/Generate",
    "/quire.v1.Inference/ListModels",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Method",
)


def each_field() -> Iterator[Call]:
    """A Generate call with each field, and the fields inside it, at its bound; then the other RPCs."""
    for descriptor in inference_pb2.GenerateRequest.DESCRIPTOR.fields:
        request = _plain()
        fill(request, descriptor)
        yield _generate(request)
    yield lambda channel, metadata: inference_pb2_grpc.InferenceStub(channel).ListModels(
        inference_pb2.ListModelsRequest(), metadata=metadata
    )
    yield lambda channel, metadata: health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service="s" * 100_000), metadata=metadata
    )
    yield lambda channel, metadata: health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service="s" * 100_000), metadata=metadata
    )


def all_fields(siblings: int = 16) -> Call:
    """A Generate call with everything that may stand together."""
    request = _plain()
    left = {
        "model",
        "prompt",
        "beam_search",
        "resume",
        "media",
        "constraint",
        "adapter",
        "kind",
        "fill_context",
        "request_id",
        "tool_choice",
        "parallel_tool_calls",
        "parts",
    }
    for descriptor in request.DESCRIPTOR.fields:
        if descriptor.name not in left and descriptor.containing_oneof is None:
            fill(request, descriptor)
    request.n = request.best_of = siblings
    request.sampling.CopyFrom(type(request.sampling)())
    return _generate(request)


def long_answer() -> Call:
    """Much text for one reader."""
    request = _plain()
    request.n, request.max_tokens, request.ignore_eos = 8, 200, True
    return _generate(request)


def compressible(num_bytes: int) -> bytes:
    """A GenerateRequest that gzip makes a thousand times smaller."""
    return inference_pb2.GenerateRequest(text="x" * num_bytes).SerializeToString()


def raw_call(channel: grpc.aio.Channel, message: bytes, number: int) -> Any:
    """A call without a key, of one of the port's methods by number."""
    method: Any = channel.unary_stream(METHODS[number % len(METHODS)])
    return method(message)


def fill(message: Message, descriptor: Any) -> None:
    """Put the largest value there that a client would think of."""
    name = descriptor.name
    if descriptor.is_repeated:
        count, chars = _REPEATED.get(name, (128, 64))
        if descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            texts = [_text(chars) for _ in range(count)]
            is_bytes = descriptor.type == FieldDescriptor.TYPE_BYTES
            getattr(message, name).extend([text.encode() for text in texts] if is_bytes else texts)
        elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for _ in range(count):
                getattr(message, name).add()
    elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        inside = getattr(message, name)
        inside.SetInParent()
        for each in inside.DESCRIPTOR.fields:
            if each.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
                fill(inside, each)
    elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = descriptor.type == FieldDescriptor.TYPE_BYTES
        setattr(message, name, b"\x2c\x01\x00\x00" * 1024 if is_bytes else _text(256))
    elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        kind = descriptor.enum_type
        setattr(message, name, kind.values[-1].number if kind else 0)
    else:
        setattr(message, name, _MOST.get(name, _ENDS[descriptor.cpp_type]))


def _plain() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="ABUSE:", max_tokens=64)


def _generate(request: inference_pb2.GenerateRequest) -> Call:
    return lambda channel, metadata: inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)


def _text(chars: int) -> str:
    return "".join(_RNG.choices(string.ascii_letters, k=chars))
