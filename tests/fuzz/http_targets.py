"""Targets: bodies of HTTP requests. The parsers by themselves, which are fast; and the whole router with all routes,
with fakes of a scheduler and a tokenizer behind it."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
from redis import Redis

from quire_common.errors import QuireError
from quire_router.front.http.bodies.body_parsers import parse_body
from quire_router.front.http.body import parse_object
from quire_router.front.parameters.request_limits import Limits
from tests.fakes.router.parsed_requests import crossed, same
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.fuzz.changes.json_changes import changed_json
from tests.fuzz.strict_tokenizer import StrictTokenizer
from tests.fuzz.target import Finding, Outcome, Target, check_error
from tests.redis_server import RedisServer
from tests.unit.kvstore.tiers import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
_SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "seed": 7,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0, "6": -100},
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "n": 2,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2, 97],
    "min_tokens": 1,
    "ignore_eos": False,
    "max_tokens": 4,
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "fake", "prompt": "abc", **_SAMPLING},
        {"model": "fake", "prompt": [[97, 98], [99]], "logprobs": 2, "echo": True, "max_tokens": 2, "best_of": 2},
        {
            "model": "fake",
            "prompt": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 2,
        },
        {"model": "fake", "prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2, "length_penalty": 1.0},
        {
            "model": "fake",
            "prompt": "a",
            "kv_transfer_params": {"do_remote_decode": True},
            "max_tokens": 1,
            "suffix": "",
        },
    ],
    "/v1/chat/completions": [
        {"model": "fake", "messages": _CHAT, **_SAMPLING, "logprobs": True, "top_logprobs": 2},
        {
            "model": "fake",
            "messages": _CHAT,
            "stream": True,
            "max_completion_tokens": 3,
            "user": "u",
            "metadata": {"a": "b"},
        },
        {
            "model": "fake",
            "messages": _CHAT,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "max_tokens": 1,
            "chat_template_kwargs": {"enable_thinking": True},
            "response_format": {"type": "text"},
            "tool_choice": "none",
        },
    ],
    "/inference/v1/generate": [
        {"model": "fake", "token_ids": [97, 98], "sampling_params": {"max_tokens": 2, "logprobs": 1}, "stream": False},
    ],
    "/v1/responses": [
        {"model": "fake", "input": "Hi", "max_output_tokens": 2, "store": True, "metadata": {"a": "b"}},
        {
            "model": "fake",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "stream": True,
            "max_output_tokens": 2,
            "instructions": "Be brief.",
            "temperature": 0.1,
            "background": False,
        },
    ],
    "/v1/messages": [
        {
            "model": "fake",
            "max_tokens": 2,
            "system": "Be brief.",
            "messages": [{"role": "user", "content": "a"}],
            "stop_sequences": ["b"],
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "metadata": {"user_id": "u"},
        },
        {
            "model": "fake",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"model": "fake", "messages": [{"role": "user", "content": "a"}], "system": "s"}],
    "/tokenize": [{"model": "fake", "prompt": "abc"}, {"model": "fake", "messages": _CHAT, "return_token_strs": True}],
    "/detokenize": [{"model": "fake", "tokens": [97, 98]}],
    "/v1/completions/render": [{"model": "fake", "prompt": "abc"}],
    "/v1/chat/completions/render": [{"model": "fake", "messages": _CHAT}],
    "/invocations": [{"model": "fake", "prompt": "abc", "max_tokens": 1}],
}
_TEXT_OF_WORDS = """
    assistant user tool developer image_url input_text output_text refusal json_schema auto timeout priority
    cache_salt request_id truncate_prompt_tokens prompt_logprobs min_tokens tools thinking_token_budget
    reasoning_effort documents typical_p repetition_detection logits_processors return_tokens_as_token_ids
    skip_special_tokens guided_json structured_outputs previous_response_id prefix_token_ids stream_options
    continue_final_message chat_template mm_processor_kwargs
    """
_WORDS = (
    *sorted({name for bodies in BODIES.values() for body in bodies for name in body}),
    *_TEXT_OF_WORDS.split(),
)
_PATHS = tuple(BODIES)


def seeds_of_bodies(paths: tuple[str, ...]) -> list[bytes]:
    """Bodies behind a byte that names the route."""
    return [bytes([number]) + json.dumps(body).encode() for number, path in enumerate(paths) for body in BODIES[path]]


def is_object(body: bytes) -> bool:
    """Whether the router's own parser takes the body as a JSON object."""
    try:
        parse_object(body)
    except QuireError:
        return False
    return True


_LIMITS = Limits(128, 20)
_PARSERS = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/inference/v1/generate": "tokens",
    "/v1/responses": "response",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count",
}


class BodyTarget(Target):
    """The parsers of bodies, without a router around them."""

    covers = (
        "router/quire_router/front/http/bodies/body_parsers.py",
        "router/quire_router/front/http/bodies/parsed_codec.py",
        "router/quire_router/front/http/parsing",
        "router/quire_router/front/parameters",
        "router/quire_router/front/http/responses/parse.py",
    )

    def seeds(self) -> list[bytes]:
        return seeds_of_bodies(tuple(_PARSERS))

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return data[:1] + changed_json(data[1:], choose, _WORDS)

    def run(self, data: bytes) -> Outcome:
        parser = list(_PARSERS.values())[(data[0] if data else 0) % len(_PARSERS)]
        try:
            parse_object(data[1:])
        except QuireError as error:
            check_error(error)
            return Outcome.UNREADABLE
        try:
            parsed = parse_body(parser, data[1:], _LIMITS, {}, timings=False)
        except QuireError as error:
            check_error(error)
            return Outcome.REFUSED
        if not same(crossed(parsed), parsed):
            raise Finding("what the child process would send differs")
        return Outcome.ACCEPTED


class RouterTarget(Target):
    """A router in this process, in a loop of the target's own, that runs while an input does."""

    def __init__(self, folder: Path, **config: Any) -> None:
        super().__init__(folder)
        # Short answers: what a request generates costs time that is no fault.
        config |= {"schedulers": [FakeScheduler(max_model_len=64)], "tokenizers": [StrictTokenizer()], "max_n": 4}
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.rig: RouterRig = self.loop.run_until_complete(self._stack.enter_async_context(router_rig(**config)))
        self.closing.callback(self.loop.close)
        self.closing.callback(lambda: self.loop.run_until_complete(self._stack.aclose()))
        client = httpx.AsyncClient(base_url=self.rig.http.base_url, timeout=60, trust_env=False)
        self.http = self.loop.run_until_complete(self._stack.enter_async_context(client))

    def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Return the whole answer. Raises Finding for a 500, and for a stream that tells of one."""
        answer = self.loop.run_until_complete(self.http.request(method, path, content=body, headers=headers))
        if answer.status_code == 500 or b'"code":"INTERNAL"' in answer.content.replace(b" ", b""):
            raise Finding(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer


class HttpTarget(RouterTarget):
    """Every route that takes a body, over a socket. The first byte is the route, the second chooses headers."""

    covers = ("router/quire_router/front/http", "router/quire_router/requests", "router/quire_router/text")

    def seeds(self) -> list[bytes]:
        return [seed[:1] + b"\0" + seed[1:] for seed in seeds_of_bodies(_PATHS)]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        headers = bytes([choose.randrange(256)]) if choose.random() < 0.2 else data[1:2]
        return data[:1] + headers + changed_json(data[2:], choose, _WORDS)

    def run(self, data: bytes) -> Outcome:
        if len(data) < 2:
            return Outcome.UNREADABLE
        path, body = _PATHS[data[0] % len(_PATHS)], data[2:]
        answer = self.send("POST", path, body, _HEADERS[data[1] % len(_HEADERS)])
        if answer.status_code == 200:
            return Outcome.ACCEPTED
        return Outcome.REFUSED if is_object(body) else Outcome.UNREADABLE


_HEADERS: tuple[dict[str, str], ...] = (
    {"Content-Type": "application/json"},
    {},
    {"Content-Type": "text/plain", "Content-Encoding": "gzip"},
    {"X-Request-Id": "x" * 200, "traceparent": "00-zz-1-2"},
    {
        "X-Request-Id": "a b",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b,=,",
    },
    {"Authorization": "Bearer \x7f", "Accept": "text/event-stream"},
    {"Expect": "100-continue", "X-Quire-Timings": "1"},
)


class RedisValueTarget(RouterTarget):
    """Responses, rate limits and places in progress that a Redis has for routers, whoever wrote them."""

    covers = ("router/quire_router/front/http/responses", "router/quire_router/limits")

    def __init__(self, folder: Path) -> None:
        server = RedisServer()
        server.start()
        try:
            super().__init__(folder, redis=server.url, requests_per_minute=10_000_000, tokens_per_minute=10_000_000)
        except BaseException:
            server.close()
            raise
        self.closing.callback(server.close)
        self._redis = self.closing.enter_context(Redis.from_url(server.url))
        made = self.send("POST", "/v1/responses", json.dumps(BODIES["/v1/responses"][0]).encode()).json()
        self._id = made["id"]
        eventually(self._is_written)
        (self._key,) = self._redis.keys("quire:response:*")
        self._kept = bytes(self._redis.get(self._key) or b"")
        self._limits = [key for key in self._redis.keys("quire:*") if key != self._key]

    def _is_written(self) -> bool:
        """A write of a response may outlast its request. It goes on while the loop runs."""
        self.loop.run_until_complete(asyncio.sleep(0.05))
        return bool(self._redis.keys("quire:response:*"))

    def seeds(self) -> list[bytes]:
        return [self._kept]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return changed_json(
            data, choose, ("response", "messages", "status", "completed", "in_progress", "role", "content")
        )

    def run(self, data: bytes) -> Outcome:
        self._redis.set(self._key, data)
        answers = [self.send("GET", f"/v1/responses/{self._id}"), self.send("POST", f"/v1/responses/{self._id}/cancel")]
        body = {"model": "fake", "input": "b", "max_output_tokens": 1, "store": False, "previous_response_id": self._id}
        answers.append(self.send("POST", "/v1/responses", json.dumps(body).encode()))
        if self._limits and data[:1] < b"\x80":
            key = self._limits[len(data) % len(self._limits)]
            self._redis.delete(key)
            self._redis.set(key, data)
            self.send("POST", "/tokenize", b'{"model": "fake", "prompt": "a"}')
            self._redis.delete(key)
        if not is_object(data):
            return Outcome.UNREADABLE
        return Outcome.ACCEPTED if answers[0].status_code == 200 else Outcome.REFUSED
