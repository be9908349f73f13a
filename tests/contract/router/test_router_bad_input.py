"""Each bad input over HTTP gives a typed error with cause and fix, and harms no request beside it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from quire_router.front.http.protocol import MAX_HEAD_BYTES
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

LIMIT = 4 * 1024 * 1024


@dataclass(frozen=True)
class Bad:
    name: str
    code: str
    status: int = 400
    param: str | None = None
    path: str = "/v1/completions"
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    says: str = ""


def completion(name: str, code: str, param: str, says: str = "", status: int = 400, **fields: Any) -> Bad:
    return Bad(name, code, status, param, fields={"prompt": "a", **fields}, says=says)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def chat(name: str, code: str, param: str | None, says: str = "", **fields: Any) -> Bad:
    messages = [{"role": "user", "content": "a"}]
    return Bad(name, code, param=param, path="/v1/chat/completions", fields={"messages": messages, **fields}, says=says)


PREFILL: dict[str, Any] = {"do_remote_decode": True}
PULL: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "ab"}
TRANSFERS: list[tuple[str, str, str, Any, dict[str, Any]]] = [
    ("no object", "BAD_TYPE", "kv_transfer_params", [1], {}),
    ("unknown member", "UNKNOWN_FIELD", "remote_hosts", {"remote_hosts": "a"}, {}),
    ("a word for a flag", "BAD_TYPE", "do_remote_decode", {"do_remote_decode": "yes"}, {}),
    ("both", "CONTRADICTION", "kv_transfer_params", {**PREFILL, **PULL}, {}),
    ("no engine", "MISSING_FIELD", "remote_engine_id", {**PULL, "remote_engine_id": None}, {}),
    ("no transfer", "MISSING_FIELD", "remote_request_id", {**PULL, "remote_request_id": ""}, {}),
    ("a blank transfer", "MISSING_FIELD", "remote_request_id", {**PULL, "remote_request_id": " \t"}, {}),
    ("an odd transfer", "BAD_TRANSFER_ID", "remote_request_id", {**PULL, "remote_request_id": "cmpl-1"}, {}),
    ("a long engine", "TOO_MANY_ITEMS", "remote_engine_id", {**PULL, "remote_engine_id": "e" * 1000}, {}),
    ("a host as a number", "BAD_TYPE", "remote_host", {**PULL, "remote_host": 7}, {}),
    ("port -1", "OUT_OF_RANGE", "remote_port", {**PULL, "remote_port": -1}, {}),
    ("port 65536", "OUT_OF_RANGE", "remote_port", {**PULL, "remote_port": 65536}, {}),
    ("blocks as a text", "BAD_TYPE", "remote_block_ids", {**PULL, "remote_block_ids": "0"}, {}),
    ("no ranks", "OUT_OF_RANGE", "tp_size", {**PULL, "tp_size": 0}, {}),
    ("two prompts", "TOO_MANY_SEQUENCES", "kv_transfer_params", PULL, {"prompt": ["a", "b"]}),
    ("two siblings", "TOO_MANY_SEQUENCES", "kv_transfer_params", PREFILL, {"n": 2}),
    ("the best of two", "TOO_MANY_SEQUENCES", "kv_transfer_params", PREFILL, {"best_of": 2}),
    ("beams", "TOO_MANY_SEQUENCES", "kv_transfer_params", PULL, {"use_beam_search": True, "n": 2}),
    ("a stream", "STREAM_ON", "kv_transfer_params", PREFILL, {"stream": True}),
]

TABLE = [
    completion("unknown model", "MODEL_NOT_FOUND", "model", "`other` does not exist here", 404, model="other"),
    completion("long text", "PROMPT_TOO_LONG", "prompt", "maximum context length is 100 tokens", prompt="x" * 200),
    completion("long ids", "PROMPT_TOO_LONG", "prompt", "100 tokens, the prompt has 200", prompt=[1] * 200),
    chat(
        "long chat",
        "PROMPT_TOO_LONG",
        "prompt",
        "maximum context length is 100 tokens. The prompt has more than 99",
        messages=[{"role": "user", "content": "x" * 200}],
    ),
    chat("max_tokens 0", "OUT_OF_RANGE", "max_tokens", "is 0. Choose a value from 1 to 2147483647.", max_tokens=0),
    completion("max_tokens negative", "OUT_OF_RANGE", "max_tokens", max_tokens=-5),
    completion("max_tokens beyond the context", "MAX_TOKENS_TOO_LARGE", "max_tokens", "to 99", max_tokens=100),
    completion("min over max", "MIN_TOKENS_TOO_LARGE", "min_tokens", min_tokens=9, max_tokens=3),
    completion("max_tokens text", "BAD_TYPE", "max_tokens", "a string, not an integer", max_tokens="5"),
    completion("max_tokens true", "BAD_TYPE", "max_tokens", max_tokens=True),
    completion("temperature NaN", "OUT_OF_RANGE", "temperature", "temperature is nan", temperature=float("nan")),
    completion("temperature infinite", "OUT_OF_RANGE", "temperature", temperature=float("inf")),
    completion("temperature negative", "OUT_OF_RANGE", "temperature", temperature=-1),
    completion("top_p 0", "OUT_OF_RANGE", "top_p", top_p=0),
    completion("top_k -2", "OUT_OF_RANGE", "top_k", top_k=-2),
    completion("seed too large", "OUT_OF_RANGE", "seed", " to 18446744073709551615.", seed=2**64),
    completion("n 0", "OUT_OF_RANGE", "n", n=0),
    completion("n too large", "OUT_OF_RANGE", "n", n=100_000),
    completion("too many sequences", "TOO_MANY_SEQUENCES", "n", prompt=["a"] * 20, n=100),
    completion("100k stop strings", "TOO_MANY_ITEMS", "stop", "stop has 100000 items", stop=["x"] * 100_000),
    completion("empty stop string", "BAD_STRING", "stop", stop=[""]),
    completion("long stop string", "BAD_STRING", "stop", stop="x" * 5000),
    completion("100k stop ids", "TOO_MANY_ITEMS", "stop_token_ids", stop_token_ids=list(range(100_000))),
    completion("logprobs", "TOO_MANY_LOGPROBS", "logprobs", "gives 20 at most", logprobs=1000),
    completion("unknown field", "UNKNOWN_FIELD", "temperture", "Did you mean temperature?", temperture=1),
    completion("field of the other route", "UNKNOWN_FIELD", "messages", messages=[]),
    completion("unsupported field", "PARAMETER_UNSUPPORTED", "suffix", suffix="a"),
    completion(
        "an engine without grammars",
        "STRUCTURED_OUTPUT_UNSUPPORTED",
        "structured_outputs.regex",
        structured_outputs={"regex": "a"},
    ),
    completion("no kind of structure", "CONTRADICTION", "structured_outputs", structured_outputs={}),
    completion(
        "two kinds of structure", "CONTRADICTION", "structured_outputs", structured_outputs={"regex": "a", "choice": []}
    ),
    completion(
        "two structures", "CONTRADICTION", "response_format", guided_regex="a", response_format={"type": "json_object"}
    ),
    completion("a structure without an end", "CONTRADICTION", "ignore_eos", guided_regex="a", ignore_eos=True),
    completion("choices of numbers", "BAD_TYPE", "guided_choice", guided_choice=[1]),
    completion("a schema of a list", "BAD_TYPE", "guided_json", guided_json=[1]),
    completion("an unknown kind of structure", "UNKNOWN_FIELD", "jsn", structured_outputs={"jsn": {}}),
    completion(
        "beams of a structure", "PARAMETER_UNSUPPORTED", "structured_outputs", guided_regex="a", use_beam_search=True
    ),
    completion("presence_penalty 2.1", "OUT_OF_RANGE", "presence_penalty", "from -2 to 2", presence_penalty=2.1),
    completion("frequency_penalty -3", "OUT_OF_RANGE", "frequency_penalty", frequency_penalty=-3),
    completion("repetition_penalty 0", "OUT_OF_RANGE", "repetition_penalty", "above 0", repetition_penalty=0),
    completion("repetition_penalty infinite", "OUT_OF_RANGE", "repetition_penalty", repetition_penalty=float("inf")),
    completion("a penalty as text", "BAD_TYPE", "presence_penalty", "a string, not a number", presence_penalty="1"),
    completion("bias of a word", "BAD_TYPE", "logit_bias", "'the', which is not a token id", logit_bias={"the": 1}),
    completion("bias of a wrong type", "BAD_TYPE", "logit_bias.5", logit_bias={"5": "1"}),
    completion("bias NaN", "OUT_OF_RANGE", "logit_bias.5", logit_bias={"5": float("nan")}),
    completion("bias of no token", "TOKEN_OUT_OF_RANGE", "logit_bias", "id 300, which is not", logit_bias={"300": 1}),
    completion(
        "two biases of a token", "BAD_VALUE", "logit_bias", "id 1 twice. Name each", logit_bias={"1": 5, "01": -5}
    ),
    completion("biases as a list", "BAD_TYPE", "logit_bias", logit_bias=[1]),
    completion("too many biases", "TOO_MANY_ITEMS", "logit_bias", logit_bias={str(i): 1 for i in range(2000)}),
    completion("nothing allowed", "EMPTY_LIST", "allowed_token_ids", "Allow some", allowed_token_ids=[]),
    completion("no token allowed", "TOKEN_OUT_OF_RANGE", "allowed_token_ids", allowed_token_ids=[1, 300]),
    completion("allowed by name", "BAD_TYPE", "allowed_token_ids[]", allowed_token_ids=["a"]),
    completion("a negative token allowed", "OUT_OF_RANGE", "allowed_token_ids[]", allowed_token_ids=[-1]),
    completion("100k tokens allowed", "TOO_MANY_ITEMS", "allowed_token_ids", allowed_token_ids=[1] * 100_000),
    completion("empty bad word", "BAD_STRING", "bad_words", bad_words=["a", ""]),
    completion("bad words of a wrong type", "BAD_TYPE", "bad_words[]", bad_words=[7]),
    completion("too many bad words", "TOO_MANY_ITEMS", "bad_words", bad_words=["x"] * 2000),
    completion("bad words too long together", "TOO_MANY_ITEMS", "bad_words", "entries", bad_words=["x" * 200] * 100),
    completion(
        "a pattern that is none",
        "BAD_REPETITION_DETECTION",
        "repetition_detection",
        repetition_detection={"max_pattern_size": 3},
    ),
    completion(
        "patterns the wrong way round",
        "BAD_REPETITION_DETECTION",
        "repetition_detection",
        repetition_detection={"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
    ),
    completion("a long pattern", "OUT_OF_RANGE", "max_pattern_size", repetition_detection={"max_pattern_size": 5000}),
    completion("an unknown rule", "UNKNOWN_FIELD", "pattern", repetition_detection={"pattern": 3}),
    completion("truncated to -2", "OUT_OF_RANGE", "truncate_prompt_tokens", truncate_prompt_tokens=-2),
    completion("truncated to nothing", "EMPTY_PROMPT", "prompt", truncate_prompt_tokens=0),
    completion("truncated, still too long", "PROMPT_TOO_LONG", "prompt", prompt=[1] * 300, truncate_prompt_tokens=200),
    completion("prompt_logprobs", "TOO_MANY_LOGPROBS", "prompt_logprobs", "gives 20 at most", prompt_logprobs=21),
    completion("prompt_logprobs -1", "OUT_OF_RANGE", "prompt_logprobs", prompt_logprobs=-1),
    completion("prompt_logprobs in a stream", "STREAM_ON", "prompt_logprobs", prompt_logprobs=1, stream=True),
    completion("a negative timeout", "OUT_OF_RANGE", "timeout_s", timeout_s=-1),
    completion("a timeout of years", "OUT_OF_RANGE", "timeout_s", timeout_s=1e9),
    completion("a timeout that no clock has", "OUT_OF_RANGE", "timeout_s", timeout_s=1e300),
    completion("timeout NaN", "OUT_OF_RANGE", "timeout_s", timeout_s=float("nan")),
    chat("chat: presence_penalty 2.1", "OUT_OF_RANGE", "presence_penalty", presence_penalty=2.1),
    completion("echo and logprobs in a stream", "STREAM_ON", "echo", echo=True, logprobs=1, stream=True),
    completion("no prompt", "MISSING_FIELD", "prompt", prompt=None),
    completion("empty prompt list", "EMPTY_PROMPT", "prompt", prompt=[]),
    completion("empty prompt", "EMPTY_PROMPT", "prompt", prompt=""),
    completion("mixed prompt", "BAD_TYPE", "prompt[]", prompt=["a", 5]),
    completion("prompt of a wrong type", "BAD_TYPE", "prompt", prompt={"a": 1}),
    completion("id out of the vocabulary", "TOKEN_OUT_OF_RANGE", "prompt", "Token id 5000", prompt=[1, 5000]),
    completion("negative id", "TOKEN_OUT_OF_RANGE", "prompt", prompt=[-1]),
    completion("id beyond int32", "TOKEN_OUT_OF_RANGE", "prompt", prompt=[2**40]),
    completion("too many prompts", "TOO_MANY_ITEMS", "prompt", prompt=["a"] * 2000),
    completion("stream_options alone", "STREAM_OFF", "stream_options", stream_options={"include_usage": True}),
    completion("unknown stream option", "UNKNOWN_FIELD", "usage", stream=True, stream_options={"usage": True}),
    completion("long cache salt", "TOO_MANY_ITEMS", "cache_salt", cache_salt="x" * 1000),
    *(
        completion(f"transfer: {name}", code, param, kv_transfer_params=value, **fields)
        for name, code, param, value, fields in TRANSFERS
    ),
    chat("chat: transfer", "BAD_TYPE", "remote_port", kv_transfer_params={"remote_port": "80"}),
    chat("no messages", "MISSING_FIELD", "messages", messages=[]),
    chat("message of a wrong type", "BAD_TYPE", "messages[0]", messages=["hi"]),
    chat("message without a role", "BAD_TYPE", "messages[0].role", messages=[{"content": "a"}]),
    chat(
        "an image",
        "PARAMETER_UNSUPPORTED",
        "messages[0].content[0]",
        "a part of a type other than text",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    ),
    chat("tools", "BAD_TYPE", "tools[0].function", tools=[{"type": "function"}]),
    chat("json mode", "STRUCTURED_OUTPUT_UNSUPPORTED", "response_format", response_format={"type": "json_object"}),
    chat("a format without type", "BAD_VALUE", "response_format.type", response_format={}),
    chat("no schema", "MISSING_FIELD", "response_format.json_schema", response_format={"type": "json_schema"}),
    chat(
        "a format without schema",
        "BAD_TYPE",
        "response_format.json_schema.schema",
        response_format={"type": "json_schema", "json_schema": {"name": "x"}},
    ),
    chat("deep template arguments", "JSON_TOO_DEEP", "chat_template_kwargs", chat_template_kwargs={"a": nested(900)}),
    chat("a deep message", "JSON_TOO_DEEP", "messages", messages=[{"role": "user", "content": "a", "x": nested(900)}]),
    chat("a deep choice of tools", "JSON_TOO_DEEP", "tool_choice", tool_choice=nested(900)),
    chat("a deep type of a tool", "JSON_TOO_DEEP", "tools[0].type", tools=[{"type": nested(900)}]),
    Bad(
        "a deep type of a server's tool",
        "JSON_TOO_DEEP",
        param="tools[0].type",
        path="/v1/messages",
        fields={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [{"type": nested(900)}]},
    ),
    chat("top_logprobs alone", "LOGPROBS_OFF", "top_logprobs", top_logprobs=2),
    chat(
        "contradiction",
        "CONTRADICTION",
        "continue_final_message",
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    Bad("broken UTF-8", "INVALID_UTF8", body=b'{"prompt": "\xff\xfe"}', says="byte 12 is wrong"),
    Bad("broken JSON", "INVALID_JSON", body=b'{"prompt": "a",}', says="column"),
    Bad("broken JSON with NaN", "INVALID_JSON", body=b'{"prompt": NaN'),
    Bad("lone surrogate", "INVALID_JSON", body=b'{"prompt": "\\ud800"}'),
    Bad("lone surrogate with NaN", "INVALID_JSON", body=b'{"prompt": "\\ud800", "temperature": NaN}'),
    Bad("deep nesting", "INVALID_JSON", body=b'{"a":' + b"[" * 100_000),
    Bad("deep nesting with NaN", "INVALID_JSON", body=b'{"a":NaN,"b":' + b"[" * 100_000),
    Bad("empty body", "INVALID_JSON", body=b""),
    Bad("no object", "NOT_AN_OBJECT", body=b"[1]"),
    Bad("10 MB body", "BODY_TOO_LARGE", 413, body=b" " * 10_000_000, says="longer than 4194304 bytes"),
    Bad("a form", "BAD_CONTENT_TYPE", body=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}),
    Bad("unknown path", "NO_SUCH_PATH", 404, path="/v1/nothing", body=b"{}"),
    Bad("wrong method", "METHOD_NOT_ALLOWED", 405, path="/version", body=b"{}"),
]


@pytest.mark.parametrize("group", range(4))
async def test_bad_request_fails_alone_with_cause_and_fix(group: int) -> None:
    async with router_rig([FakeScheduler(max_model_len=100)], max_body_bytes=LIMIT) as rig:
        rig.scheduler.gate.clear()
        beside = asyncio.ensure_future(rig.complete("abc", max_tokens=6))
        for bad in TABLE[group::4]:
            response = await send(rig, bad)
            assert response.status_code == bad.status, (bad.name, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["code"], error["param"]) == (bad.code, bad.param), bad.name
            assert error["type"] == ("not_found_error" if bad.status == 404 else "invalid_request_error")
            assert bad.says in error["message"], bad.name
            assert len(error["message"]) < 600 and response.headers["x-request-id"]
        rig.scheduler.gate.set()
        assert (await beside).json()["choices"][0]["text"] == "abcabc"
        assert len(rig.scheduler.submits) == 1  # none of them got so far
        assert (await rig.http.get("/load")).json()["server_load"] == 0


async def send(rig: RouterRig, bad: Bad) -> httpx.Response:
    content = bad.body if bad.body is not None else json.dumps(bad.fields).encode()
    headers = {"content-type": "application/json", **bad.headers}
    return await rig.http.post(bad.path, content=content, headers=headers)


def test_names_of_bad_inputs_are_unique() -> None:
    names = [bad.name for bad in TABLE]
    assert len(names) == len(set(names))


async def test_body_without_content_length_is_refused_over_the_limit() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 1_000_000

    async with router_rig(max_body_bytes=LIMIT) as rig:
        response = await rig.http.post(
            "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413 and response.headers["connection"] == "close"


async def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    neutral = {
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "seed": None,
        "user": "somebody",
        "metadata": {"a": "b"},
        "store": False,
    }
    async with router_rig() as rig:
        response = await rig.chat("a", max_tokens=2, top_logprobs=0, **neutral)
        assert response.status_code == 200, response.text


async def test_wrong_method_gets_the_allowed_methods() -> None:
    async with router_rig() as rig:
        answer = await rig.http.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        answer = await rig.http.post("/v1/models")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_oversized_request_head_is_refused() -> None:
    async with router_rig() as rig:
        host, port = rig.router.http.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /livez HTTP/1.1\r\nx: " + b"y" * (2 * MAX_HEAD_BYTES))
        answer = await asyncio.wait_for(reader.readline(), 30)
        assert answer.startswith(b"HTTP/1.1 400")
        writer.close()
