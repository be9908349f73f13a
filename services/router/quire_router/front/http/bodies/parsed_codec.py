"""Sends parsed requests from the child process to the router, so that the router's event loop reads them quickly.

A parsed request is a tree of frozen dataclasses. The tree travels as JSON. Long texts and arrays travel behind it, in
the payload: the loop copies these and looks at no single character or number. So a prompt of megabytes costs the loop
little more than a short one. Only the classes of `_FIELDS` can be made.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import orjson

from quire_common.errors import Internal, InvalidArgument, QuireError, TooLarge, Unsupported
from quire_common.logit_controls import LogitControls
from quire_common.repetition import RepetitionDetection
from quire_common.sequence import Sampling
from quire_router.front.http.bodies.body_parsers import InvocationRequest
from quire_router.front.http.parsing.parse import ParsedRequest
from quire_router.front.http.parsing.text_fields import CountRequest, DetokenizeRequest, RenderRequest, TokenizeRequest
from quire_router.front.http.responses.parse import AskedResponse
from quire_router.sequences.job import (
    ChatPrompt,
    GenerateJob,
    KvSource,
    Parsing,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    Wants,
)
from quire_router.sequences.structured import RequiredTools, StructuredOutput

_FIELDS: dict[type[Any], tuple[str, ...]] = {
    cls: tuple(each.name for each in fields(cls) if each.init)
    for cls in (
        AskedResponse,
        ChatPrompt,
        CountRequest,
        DetokenizeRequest,
        GenerateJob,
        InvocationRequest,
        KvSource,
        LogitControls,
        ParsedRequest,
        Parsing,
        RenderRequest,
        RepetitionDetection,
        RequiredTools,
        Sampling,
        StructuredOutput,
        TextOptions,
        TextPrompt,
        TokenPrompt,
        TokenizeRequest,
        Wants,
    )
}
_CLASSES = {cls.__name__: cls for cls in _FIELDS}
_ERRORS: dict[str, type[QuireError]] = {cls.__name__: cls for cls in (Internal, InvalidArgument, TooLarge, Unsupported)}
# Longer texts and tuples travel in the payload.
_SHORT = 64
_TUPLE, _TEXT, _BYTES, _INT32, _INTS, _STRINGS = "tuple", "text", "bytes", "int32", "ints", "strings"


class _Encoder:
    """Collects the payload of one tree."""

    def __init__(self) -> None:
        self.payload: list[bytes] = []
        self._size = 0
        # A conversation's tools stand in several places of a request.
        self._texts: dict[str, list[Any]] = {}

    def encode(self, value: Any) -> Any:
        """Return the JSON value for a part of the tree; texts of more than 64 characters, bytes, arrays (as int32), and
        the tuples that `_tuple` names go to the payload. A list begins with the name of a class, which its fields
        follow, or with a kind such as `tuple` or `text`. Raises TypeError for a number that is not finite, and KeyError
        for an unknown class."""
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise TypeError("a number is not finite")
            return value
        if isinstance(value, str):
            return value if len(value) <= _SHORT else self._text(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, bytes):
            return self._append(_BYTES, value)
        if isinstance(value, np.ndarray):
            return self._append(_INT32, np.ascontiguousarray(value, "<i4").tobytes())
        cls = type(value)
        return [cls.__name__, *(self.encode(getattr(value, name)) for name in _FIELDS[cls])]

    def _tuple(self, items: tuple[Any, ...]) -> list[Any]:
        """Return the JSON value of a tuple. One of more than 64 items, all of them integers or all strings, goes to the
        payload; any other is encoded item by item."""
        kinds = set(map(type, items)) if len(items) > _SHORT else set()
        if kinds == {int}:
            return self._append(_INTS, np.array(items, "<i8").tobytes())
        if kinds == {str}:
            return self._append(_STRINGS, orjson.dumps(items))
        return [_TUPLE, *map(self.encode, items)]

    def _text(self, text: str) -> list[Any]:
        """Append a long text to the payload, once for all its occurrences. Returns the JSON value that stands for the
        text, with its place in the payload."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._append(_TEXT, text.encode())
        return found

    def _append(self, kind: str, content: bytes) -> list[Any]:
        """Append bytes to the payload; return `kind` and their start and end in it."""
        start, self._size = self._size, self._size + len(content)
        self.payload.append(content)
        return [kind, start, self._size]


class _Decoder:
    def __init__(self, payload: bytes) -> None:
        self._payload = memoryview(payload)
        self._texts: dict[int, str] = {}

    def decode(self, value: Any) -> Any:
        """Return the part of the tree that `_Encoder.encode` made this JSON value of. Texts and arrays come from the
        payload; a text that occurs more than once is decoded once."""
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind in _CLASSES:
            return _CLASSES[kind](*map(self.decode, rest))
        if kind == _TUPLE:
            return tuple(map(self.decode, rest))
        start, end = rest
        if kind == _TEXT:
            if start not in self._texts:
                self._texts[start] = str(self._payload[start:end], "utf-8")
            return self._texts[start]
        content = self._payload[start:end]
        if kind == _INT32:
            return np.frombuffer(content, "<i4").astype(np.int32)
        if kind == _INTS:
            return tuple(np.frombuffer(content, "<i8").tolist())
        return tuple(orjson.loads(content)) if kind == _STRINGS else bytes(content)


def encode_parsed(parsed: Any) -> tuple[dict[str, Any], bytes]:
    """Return the message and the payload for what a parser returned. Raises KeyError or TypeError for an object that
    no parser returns."""
    encoder = _Encoder()
    return {"parsed": encoder.encode(parsed)}, b"".join(encoder.payload)


def encode_refusal(error: QuireError) -> dict[str, Any]:
    """Return the message for an error of a body: one of `_ERRORS`."""
    return {"refused": [type(error).__name__, error.code, error.message, error.fix, error.param]}


def decode_parsed(message: dict[str, Any], payload: bytes) -> Any:
    """Return what the parser returned in the child process, or raise the error with which it refused the body."""
    if "refused" in message:
        kind, code, text, fix, param = message["refused"]
        raise _ERRORS[kind](code, text, fix, param=param)
    return _Decoder(payload).decode(message["parsed"])
