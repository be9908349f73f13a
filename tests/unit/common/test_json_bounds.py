from __future__ import annotations

import json
import time

import orjson
import pytest

from quire_common.errors import InvalidArgument
from quire_common.json_bounds import MAX_STRUCTURE, check_structure

BODY_BYTES = 4 * 1024 * 1024


def filled(item: bytes, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening + b",".join([item] * (BODY_BYTES // (len(item) + 1))) + closing


@pytest.mark.parametrize(
    "text",
    [
        filled(b"[]"),
        filled(b"{}"),
        filled(b'{"type":"text","text":""}'),
        filled(b'""'),
        b"{" + b",".join(b'"%06d":1' % i for i in range(BODY_BYTES // 11)) + b"}",
        filled(b"[" * 9 + b"]" * 9),
    ],
)
def test_texts_that_take_long_to_parse_are_refused_at_once(text: bytes) -> None:
    started = time.process_time()
    with pytest.raises(InvalidArgument, match="TOO_MANY_VALUES"):
        check_structure(text)
    assert time.process_time() - started < 0.2  # a parser takes up to 0.6 s


@pytest.mark.parametrize(
    "text",
    [
        filled(b"1"),  # two million token ids
        json.dumps({"prompt": "[{:" * 1_000_000}).encode(),
        json.dumps({"prompt": json.dumps({"a": [{"b\\": '\\\\"'}] * 100_000})}).encode(),
        json.dumps({"prompt": ["a prompt"] * 1024}).encode(),
        json.dumps([{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000).encode(),
    ],
)
def test_what_clients_send_is_taken(text: bytes) -> None:
    check_structure(text)
    orjson.loads(text)


@pytest.mark.parametrize("filling", [b'"\\\\"', b'"\\""', b'"\\\\\\""'])
def test_escapes_do_not_hide_the_end_of_a_string(filling: bytes) -> None:
    text = b"[" + filling + b",[]" * (MAX_STRUCTURE + 1) + b"]"
    orjson.loads(text)
    with pytest.raises(InvalidArgument, match="TOO_MANY_VALUES"):
        check_structure(text)
