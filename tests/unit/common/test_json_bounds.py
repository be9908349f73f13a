from __future__ import annotations

import json
import time
from collections.abc import Callable

import orjson
import pytest

from quire_common.errors import InvalidArgument
from quire_common.json_bounds import MAX_STRUCTURE, check_structure

BODY_BYTES = 4 * 1024 * 1024


def filled(item: bytes, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening + b",".join([item] * (BODY_BYTES // (len(item) + 1))) + closing


# The texts are megabytes long: a process makes those of the tests that it runs.
COSTLY: dict[str, Callable[[], bytes]] = {
    "lists": lambda: filled(b"[]"),
    "objects": lambda: filled(b"{}"),
    "messages": lambda: filled(b'{"type":"text","text":""}'),
    "strings": lambda: filled(b'""'),
    "keys": lambda: b"{" + b",".join(b'"%06d":1' % i for i in range(BODY_BYTES // 11)) + b"}",
    "nested lists": lambda: filled(b"[" * 9 + b"]" * 9),
}
USUAL: dict[str, Callable[[], bytes]] = {
    "two million token ids": lambda: filled(b"1"),
    "brackets in a string": lambda: json.dumps({"prompt": "[{:" * 1_000_000}).encode(),
    "JSON in a string": lambda: json.dumps({"prompt": json.dumps({"a": [{"b\\": '\\\\"'}] * 100_000})}).encode(),
    "prompts": lambda: json.dumps({"prompt": ["a prompt"] * 1024}).encode(),
    "messages": lambda: json.dumps([{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000).encode(),
}


@pytest.mark.parametrize("name", COSTLY)
def test_texts_that_take_long_to_parse_are_refused_at_once(name: str) -> None:
    text = COSTLY[name]()
    started = time.process_time()
    with pytest.raises(InvalidArgument, match="TOO_MANY_VALUES"):
        check_structure(text)
    assert time.process_time() - started < 0.2  # a parser takes up to 0.6 s


@pytest.mark.parametrize("name", USUAL)
def test_what_clients_send_is_taken(name: str) -> None:
    text = USUAL[name]()
    check_structure(text)
    orjson.loads(text)


@pytest.mark.parametrize("filling", [b'"\\\\"', b'"\\""', b'"\\\\\\""'])
def test_escapes_do_not_hide_the_end_of_a_string(filling: bytes) -> None:
    text = b"[" + filling + b",[]" * (MAX_STRUCTURE + 1) + b"]"
    orjson.loads(text)
    with pytest.raises(InvalidArgument, match="TOO_MANY_VALUES"):
        check_structure(text)
