"""Tokenizing, detokenizing and rendering over HTTP; requests of tokens; CORS; models by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire_common.errors import ConfigError
from quire_router.config import RouterConfig
from quire_router.front.http.cors import make_cors
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


async def post(rig: RouterRig, path: str, **body: Any) -> Any:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(rig: RouterRig, path: str, **body: Any) -> tuple[int, str, str | None]:
    answer = await rig.http.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_tokenize_accepts_a_text() -> None:
    async with router_rig([FakeScheduler(max_model_len=77)]) as rig:
        assert await post(rig, "/tokenize", model="fake", prompt="aé") == {
            "count": 3,
            "max_model_len": 77,
            "tokens": [97, 0xC3, 0xA9],
            "token_strs": None,
        }
        told = await post(rig, "/tokenize", prompt="aé", return_token_strs=True)
        assert told["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
        assert (await post(rig, "/tokenize", prompt=""))["count"] == 0
        assert (await post(rig, "/tokenize", prompt="x" * 500))["count"] == 500  # whatever the context


async def test_tokenize_accepts_a_conversation() -> None:
    async with router_rig() as rig:
        messages = [{"role": "user", "content": "hi"}]
        told = await post(rig, "/tokenize", messages=messages)
        assert bytes(told["tokens"]).decode() == "user: hi\nassistant: "
        told = await post(rig, "/tokenize", messages=messages, add_generation_prompt=False)
        assert bytes(told["tokens"]).decode() == "user: hi\n"


async def test_detokenize_returns_the_text() -> None:
    async with router_rig() as rig:
        assert await post(rig, "/detokenize", tokens=list("né".encode())) == {"prompt": "né"}
        assert await post(rig, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/tokenize", {}, (400, "MISSING_FIELD", "prompt")),
        ("/tokenize", {"prompt": 3}, (400, "BAD_TYPE", "prompt")),
        ("/tokenize", {"prompt": "a", "model": "other"}, (404, "MODEL_NOT_FOUND", "model")),
        ("/tokenize", {"messages": []}, (400, "MISSING_FIELD", "messages")),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "mm_processor_kwargs": {"a": 1}},
         (400, "PARAMETER_UNSUPPORTED", "mm_processor_kwargs")),
        ("/tokenize", {"prompt": "a", "promt": "b"}, (400, "UNKNOWN_FIELD", "promt")),
        ("/detokenize", {}, (400, "MISSING_FIELD", "tokens")),
        ("/detokenize", {"tokens": ["a"]}, (400, "BAD_TYPE", "tokens")),
        ("/detokenize", {"tokens": [-1]}, (400, "TOKEN_OUT_OF_RANGE", "tokens")),
        ("/inference/v1/generate", {"token_ids": [1]}, (400, "MISSING_FIELD", "sampling_params")),
        ("/inference/v1/generate", {"sampling_params": {}}, (400, "MISSING_FIELD", "token_ids")),
        ("/inference/v1/generate", {"token_ids": [999], "sampling_params": {}}, (400, "TOKEN_OUT_OF_RANGE", "prompt")),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temprature": 1}},
         (400, "UNKNOWN_FIELD", "temprature")),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "features": {"a": 1}},
         (400, "PARAMETER_UNSUPPORTED", "features")),
        ("/invocations", {"input": "a"}, (400, "MISSING_FIELD", "messages")),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, (400, "PARAMETER_UNSUPPORTED", "suffix")),
    ],
)  # fmt: skip
async def test_bad_bodies_get_named_errors(path: str, body: dict[str, Any], wanted: tuple[int, str, str]) -> None:
    async with router_rig() as rig:
        assert await refused(rig, path, **body) == wanted
        assert not rig.scheduler.submits


async def test_generate_route_takes_and_returns_tokens() -> None:
    async with router_rig() as rig:
        sampling = {"max_tokens": 4, "n": 2, "logprobs": 0, "prompt_logprobs": 0, "seed": 3}
        told = await post(rig, "/inference/v1/generate", token_ids=[97, 98], sampling_params=sampling, request_id="r1")
        assert told["request_id"] == "r1" and told["kv_transfer_params"] is None
        assert [c["token_ids"] for c in told["choices"]] == [[97, 98, 97, 98]] * 2
        assert [c["finish_reason"] for c in told["choices"]] == ["length"] * 2
        assert [t["token"] for t in told["choices"][0]["logprobs"]["content"]] == ["a", "b", "a", "b"]
        assert told["prompt_logprobs"][0] is None and told["prompt_logprobs"][1]["98"]["logprob"] == -1
        assert told["usage"]["completion_tokens"] == 8
        assert len((await post(rig, "/inference/v1/generate", token_ids=[97], sampling_params={}))["choices"]) == 1
        assert rig.scheduler.submits[-1].sequence.stop.max_tokens == 16


async def test_tokens_are_streamed_while_their_text_is_held_back() -> None:
    async with router_rig([FakeScheduler(step_s=0.01)]) as rig:
        ids, sampling = list("é😀ab".encode()), {"max_tokens": 8, "stop": ["abc"]}
        body = {
            "token_ids": ids,
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await rig.http.post("/inference/v1/generate", json=body)
        *frames, done, _ = answer.text.split("\n\n")
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        assert done == "data: [DONE]" and chunks[-1]["usage"]["completion_tokens"] == 8
        choices = [c["choices"][0] for c in chunks[:-1]]
        assert [i for c in choices for i in c["token_ids"]] == ids
        assert len(choices) >= 8 and choices[-1]["finish_reason"] == "length"


FIELDS = {
    "max_tokens": 7,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 5,
    "min_p": 0.25,
    "typical_p": 0.9375,
    "seed": 11,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "logit_bias": {"9": 1.5},
    "bad_words": ["zz"],
    "stop": ["zzz"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    "cache_salt": "s",
}


@pytest.mark.parametrize("fields", [{}, FIELDS], ids=["defaults", "every field"])
async def test_rendered_request_gives_the_same_answer(fields: dict[str, Any]) -> None:
    async with router_rig([FakeScheduler(max_model_len=400)]) as rig:
        messages = [{"role": "user", "content": "hello"}]
        for path, body in (
            ("/v1/completions", {"prompt": ["hello"], **fields}),
            ("/v1/chat/completions", {"messages": messages, **fields}),
        ):
            direct = await post(rig, path, **{"seed": 5, **body})
            rendered = await post(rig, f"{path}/render", **{"seed": 5, **body})
            one = rendered[0] if path == "/v1/completions" else rendered
            before = rig.scheduler.submits[-1].sequence
            told = await post(rig, "/inference/v1/generate", **one)
            assert rig.scheduler.submits[-1].sequence == before
            assert told["usage"] == direct["usage"]


async def test_render_returns_one_request_per_prompt() -> None:
    async with router_rig() as rig:
        rendered = await post(rig, "/v1/completions/render", prompt=["ab", "c"], max_tokens=3, request_id="r")
        assert [(r["request_id"], r["token_ids"]) for r in rendered] == [("r-0", [97, 98]), ("r-1", [99])]
        assert rendered[0]["sampling_params"] == {"max_tokens": 3, "temperature": 1.0}
        assert not rig.scheduler.submits
        assert await refused(rig, "/v1/completions/render", prompt="a" * 5000) == (400, "PROMPT_TOO_LONG", "prompt")


async def test_render_keeps_the_timeout_and_refuses_router_only_fields() -> None:
    async with router_rig() as rig:
        (rendered,) = await post(rig, "/v1/completions/render", prompt="ab", timeout_s=3, max_tokens=3)
        assert rendered["sampling_params"] == {"max_tokens": 3, "temperature": 1.0, "timeout_s": 3.0}
        for fields, name in (({"n": 2, "best_of": 3}, "best_of"), ({"max_tokens": 0, "echo": True}, "max_tokens")):
            answer = await refused(rig, "/v1/completions/render", prompt="ab", **fields)
            assert answer == (400, "PARAMETER_UNSUPPORTED", name)


@pytest.mark.deep
async def test_data_parallel_rank_other_than_0_is_refused() -> None:
    async with router_rig() as rig:
        for rank, status in (("0", 200), ("1", 400)):
            headers = {"X-data-parallel-rank": rank}
            body = {"prompt": "a", "max_tokens": 1}
            answer = await rig.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "x-data-parallel-rank" and len(rig.scheduler.submits) == 1


async def test_model_route_finds_models_by_name() -> None:
    async with router_rig(served_model_name=("a/b", "c")) as rig:
        listed = (await rig.http.get("/v1/models")).json()["data"]
        assert (await rig.http.get("/v1/models/a/b")).json() == listed[0]
        assert (await rig.http.get("/v1/models/c")).json() == listed[1]
        answer = await rig.http.get("/v1/models/d")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")


ASK = {"Origin": "http://page", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}


async def test_cors_is_closed_by_default() -> None:
    async with router_rig(api_key=("k",)) as rig:
        answer = await rig.http.options("/v1/completions", headers=ASK)
        assert answer.status_code == 204
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = await rig.http.get("/health", headers={"Origin": "http://page"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ['["*"]', "page", "http://page/", "http://"])
def test_invalid_allowed_origin_is_a_config_error(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        make_cors(RouterConfig(allowed_origins=("http://[::1]:3000", "*", "null", origin)))


async def test_cors_allows_configured_origins() -> None:
    async with router_rig(api_key=("k",), allowed_origins=("http://page",), allow_credentials=True) as rig:
        answer = await rig.http.options("/v1/completions", headers=ASK)
        assert answer.headers["access-control-allow-origin"] == "http://page"
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert answer.headers["access-control-allow-headers"] == "x-a"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert answer.headers["vary"] == "origin"
        bare = await rig.http.post("/v1/completions", headers={"Origin": "http://page"}, json={})
        assert bare.status_code == 401 and bare.headers["access-control-allow-origin"] == "http://page"
        other = await rig.http.get("/health", headers={"Origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers
    async with router_rig(allowed_origins=("*",)) as rig:
        answer = await rig.http.get("/health", headers={"Origin": "http://any"})
        assert answer.headers["access-control-allow-origin"] == "*" and "vary" not in answer.headers
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} < set(exposed)
        assert answer.headers.get_list("access-control-allow-origin") == ["*"]
        plain = await rig.http.options("/v1/completions")
        assert plain.status_code == 405


@pytest.mark.parametrize(
    ("credentials", "methods", "vary"),
    [(True, "PUT", "access-control-request-method, access-control-request-headers, origin"), (False, "*", "origin")],
)
async def test_cors_preflight_names_the_asked_method_if_a_page_may_send_credentials(
    credentials: bool, methods: str, vary: str
) -> None:
    """With credentials, browsers take `*` as the name of a method."""
    allowed: dict[str, Any] = {
        "allowed_origins": ("http://page",),
        "allowed_methods": ("*",),
        "allow_credentials": credentials,
    }
    async with router_rig(**allowed) as rig:
        answer = await rig.http.options("/v1/completions", headers={**ASK, "Access-Control-Request-Method": "PUT"})
        assert answer.headers["access-control-allow-methods"] == methods
        assert answer.headers["access-control-allow-headers"] == "x-a"
        assert answer.headers["vary"] == vary


async def test_x_api_key_header_is_accepted() -> None:
    async with router_rig(api_key=("k",)) as rig:
        for headers, status in (
            ({"x-api-key": "k"}, 200),
            ({"x-api-key": "no"}, 401),
            ({"x-api-key": "k", "authorization": "Bearer k"}, 200),
            ({"x-api-key": "k", "authorization": "Bearer no"}, 401),
        ):
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == status
