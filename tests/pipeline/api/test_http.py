"""OpenAI's HTTP API over the five real processes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = "KING HENRY:\nOnce more unto the breach, dear friends,"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Speak."}], "temperature": 0, "max_tokens": 12}


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chunk; the stream must end by [DONE]."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/v1/models"]
)
def test_information_routes_answer(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_readiness_lists_schedulers_and_tokenizers(http: httpx.Client) -> None:
    body = http.get("/readyz").json()
    assert body["ready"]
    assert [scheduler["phase"] for scheduler in body["schedulers"]] == ["ready"]
    assert [tokenizer["phase"] for tokenizer in body["tokenizers"]] == ["ready"]


def test_http_completion_is_whole(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    answer = http.post("/v1/completions", json={**GREEDY, "model": model}, headers={"X-Request-Id": "mine"})
    body = answer.json()
    assert answer.headers["x-request-id"] == "mine"
    assert (body["object"], body["model"]) == ("text_completion", model)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["total_tokens"] == 20 + body["usage"]["prompt_tokens"]


def test_http_stream_equals_the_whole_answer(http: httpx.Client) -> None:
    # So long that not all of it waits while one of the services has no processor.
    body = {**GREEDY, "max_tokens": 160}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    chunks = stream(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *texts, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == whole
    assert len(texts) > 2
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in texts[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 160


def test_chat_whole_and_streamed(http: httpx.Client) -> None:
    whole = http.post("/v1/chat/completions", json=CHAT).json()
    message = whole["choices"][0]["message"]
    chunks = stream(http, "/v1/chat/completions", CHAT)
    assert message["role"] == "assistant"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == message["content"]


def test_timings_are_sent_on_request(http: httpx.Client) -> None:
    body = http.post("/v1/completions", json=GREEDY, headers={"X-Quire-Timings": "1"}).json()
    services = {timing["service"] for timing in body["quire_timings"]}
    assert {"router", "tokenizer", "scheduler", "worker"} <= services
    assert "quire_timings" not in http.post("/v1/completions", json=GREEDY).json()


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("max_tokens negative", {**GREEDY, "max_tokens": -5}, 400, "max_tokens"),
    ("temperature negative", {**GREEDY, "temperature": -1}, 400, "temperature"),
    ("temperature text", {**GREEDY, "temperature": "hot"}, 400, "temperature"),
    ("unknown model", {**GREEDY, "model": "nope"}, 404, "model"),
    ("unknown field", {**GREEDY, "no_such_field": 1}, 400, "no_such_field"),
    ("prompt too long", {**GREEDY, "prompt": [7] * 9000}, 400, "prompt"),
    ("100k stop strings", {**GREEDY, "stop": ["x"] * 100_000}, 400, "stop"),
]


@pytest.mark.parametrize(("body", "status", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_fields_are_named(http: httpx.Client, body: dict[str, Any], status: int, param: str) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["param"] == param
    assert http.post("/v1/completions", json=GREEDY).status_code == 200


RAW: list[tuple[str, bytes, int]] = [
    ("NaN", b'{"prompt": "x", "temperature": NaN}', 400),
    ("broken UTF-8", b'{"prompt": "\xff\xfe"}', 400),
    ("no JSON", b"prompt=x", 400),
    ("nothing", b"", 400),
    ("10 MB", b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    ("deep nesting", b"[" * 100_000, 400),
]


@pytest.mark.parametrize(("body", "status"), [case[1:] for case in RAW], ids=[case[0] for case in RAW])
def test_bad_bodies_are_refused(http: httpx.Client, body: bytes, status: int) -> None:
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_wrong_path_and_method_are_refused(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
