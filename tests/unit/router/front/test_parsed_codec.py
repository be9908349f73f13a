"""What the child process sends of a parsed request is what the router has in its hands."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from quire_common.children.frames import Frame
from quire_common.errors import Internal, InvalidArgument, QuireError, TooLarge, Unsupported
from quire_router.front.http.bodies.body_child import run_job
from quire_router.front.http.bodies.body_parsers import PARSERS, parse_body
from quire_router.front.http.bodies.parsed_codec import decode_parsed, encode_parsed, encode_refusal
from quire_router.front.parameters.request_limits import Limits
from quire_router.sequences.job import TextPrompt, TokenPrompt
from tests.fakes.router.parsed_requests import crossed, same

LIMITS = Limits(max_n=128, max_logprobs=20)
TEXT = "To be, or not to be: \u00e9\u6c49\U0001f600 " * 50
TOOLS = [{"type": "function", "function": {"name": "f", "description": TEXT, "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}, {"role": "assistant", "content": None}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.1,
    "seed": 2**63 - 1,
    "logit_bias": {str(token): -1.5 for token in range(1000)},
    "allowed_token_ids": list(range(16_384)),
    "stop_token_ids": list(range(100)),
    "bad_words": [f"word{number}" for number in range(500)],
    "stop": [TEXT[:500], "\n"],
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
    "timeout_s": 1e-7,
}
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("completion", {"prompt": TEXT, **SAMPLING}),
    ("completion", {"prompt": ["", TEXT, "a"], "n": 2, "best_of": 3, "stream": False, "echo": True}),
    ("completion", {"prompt": [[], [0, 2**31 - 1], [5] * 5000], "guided_regex": "(a|b)" * 100}),
    ("completion", {"prompt": "", "kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}),
    (
        "completion",
        {
            "prompt": "a",
            "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "00ff"},
        },
    ),
    ("chat", {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "documents": [{"text": TEXT}]}),
    (
        "chat",
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    ),
    ("messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5, "system": TEXT}),
    ("tokens", {"token_ids": list(range(70_000)), "sampling_params": {"max_tokens": 3, "n": 2}}),
    ("response", {"input": [{"role": "user", "content": TEXT}], "instructions": TEXT, "metadata": {"a": "b"}}),
    ("invocation", {"messages": CHAT}),
    ("invocation", {"prompt": TEXT}),
    ("tokenize", {"prompt": TEXT, "return_token_strs": True}),
    ("tokenize", {"messages": CHAT}),
    ("detokenize", {"tokens": list(range(100_000))}),
    ("count", {"messages": [{"role": "user", "content": TEXT}]}),
    ("chat_render", {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("completion_render", {"prompt": TEXT}),
]
REFUSED: list[tuple[str, bytes]] = [
    ("chat", b"{"),
    ("chat", b"[]"),
    ("chat", b'{"messages": "\xff"}'),
    ("chat", b"[" * 200_000),
    ("chat", b"{}"),
    ("chat", b'{"mesages": []}'),
    ("completion", b'{"prompt": "a", "temperature": NaN}'),
    ("completion", b'{"prompt": "a", "n": 129}'),
    ("completion", b'{"prompt": [1, true]}'),
    ("completion", b'{"prompt": "a", "logprobs": 21}'),
    ("invocation", b"{}"),
    ("messages", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}'),
    ("response", b'{"input": "a", "background": true, "stream": true}'),
    ("tokens", b'{"token_ids": [1], "sampling_params": {"max_tokens": 0}}'),
    ("detokenize", b'{"tokens": [-1]}'),
    ("tokenize", b'{"prompt": 5}'),
    ("count", b'{"messages": []}'),
    ("chat_render", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("completion_render", b'{"prompt": "a", "guided_json": 5}'),
]


def in_child(parser: str, body: bytes) -> Any:
    """What the router has in its hands after the child process has parsed a body."""
    job = {"parser": parser, "max_n": 128, "max_logprobs": 20, "defaults": {}, "timings": False}
    message, payload = run_job(Frame(job, body))
    return decode_parsed(json.loads(json.dumps(message)), payload)


def test_every_parser_has_a_body_that_is_taken_and_one_that_is_refused() -> None:
    assert {parser for parser, _ in TAKEN} == {parser for parser, _ in REFUSED} == set(PARSERS)


@pytest.mark.parametrize(("parser", "body"), TAKEN)
def test_child_process_and_router_read_the_same_request(parser: str, body: dict[str, Any]) -> None:
    content = json.dumps(body, ensure_ascii=False).encode()
    here = parse_body(parser, content, LIMITS, {}, timings=False)
    assert same(in_child(parser, content), here)


@pytest.mark.parametrize(("parser", "body"), REFUSED)
def test_child_process_and_router_refuse_with_the_same_error(parser: str, body: bytes) -> None:
    with pytest.raises(QuireError) as here:
        parse_body(parser, body, LIMITS, {}, timings=False)
    with pytest.raises(QuireError) as there:
        in_child(parser, body)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value) and there.value.param == here.value.param


def test_a_model_has_its_own_defaults_in_both() -> None:
    defaults: Any = {"": [["temperature", 0.25]], "b": [["temperature", 0.75], ["max_tokens", 7.0]]}
    for model, temperature in ((None, 0.25), ("b", 0.75), ("c", 1.0)):
        body = json.dumps({"model": model, "prompt": "a"}).encode()
        job = {"parser": "completion", "max_n": 1, "max_logprobs": 0, "defaults": defaults, "timings": False}
        there = decode_parsed(*run_job(Frame(job, body)))
        own = {name: tuple(map(tuple, values)) for name, values in defaults.items()}
        here = parse_body("completion", body, Limits(1, 0), own, timings=False)
        assert there == here and there.job.sampling.temperature == temperature


@pytest.mark.parametrize("kind", [Internal, InvalidArgument, TooLarge, Unsupported])
def test_a_refusal_keeps_its_class(kind: type[QuireError]) -> None:
    error = kind("CODE", "The cause \u00e9.", "The fix.", param="field")
    with pytest.raises(kind) as found:
        decode_parsed(json.loads(json.dumps(encode_refusal(error))), b"")
    assert (str(found.value), found.value.param) == (str(error), "field")


def test_a_mistake_of_a_parser_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, "chat", lambda *_, **__: 1 // 0)
    with pytest.raises(Internal, match="INTERNAL"):
        in_child("chat", b"{}")


def test_a_long_text_is_sent_once_and_is_one_object_again() -> None:
    parsed = parse_body("chat", json.dumps({"messages": CHAT, "tools": TOOLS}).encode(), LIMITS, {}, timings=False)
    _, payload = encode_parsed(parsed)
    assert payload.count(b'"name":"f"') == 1
    job = crossed(parsed).job
    assert job.prompts[0].tools_json is job.text.parsing.tools_json


def test_arrays_and_long_texts_are_not_in_the_message() -> None:
    message, payload = encode_parsed(TokenPrompt(np.arange(100_000, dtype=np.int32)))
    assert len(json.dumps(message)) < 100 and len(payload) == 400_000
    message, payload = encode_parsed(TextPrompt("a" * 100_000))
    assert len(json.dumps(message)) < 100 and len(payload) == 100_000


@pytest.mark.parametrize("value", [object(), Frame({}), float("nan"), {"a": 1}])
def test_other_objects_are_not_sent(value: object) -> None:
    with pytest.raises((KeyError, TypeError)):
        encode_parsed((value,))
