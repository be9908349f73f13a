"""The OpenAPI document and the routes say the same; answers, events and bodies are as it has them.

Every JSON answer of every test on a router rig is held against the document, too (tests/fakes/router/api_document.py).
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from quire_router.front.http.open_paths import OPEN_PATHS
from tests.fakes.router.api_document import DOCUMENT, check_events, check_request, validator
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

MESSAGES = [{"role": "user", "content": "hé"}]


async def test_openapi_document_describes_exactly_the_routes() -> None:
    async with router_rig(metrics_on_main=True, api_key=("k",)) as rig:
        routes = {
            (route.path.replace(":path}", "}"), method.lower())
            for route in rig.router.routes.routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD"
        }
        answer = await rig.http.get("/openapi.json")
        told = answer.json()
        assert {(path, method) for path, methods in told["paths"].items() for method in methods} == routes
        for path, methods in told["paths"].items():
            for operation in methods.values():
                assert ("security" in operation) == (path not in OPEN_PATHS)
    async with router_rig(api_key=("k",)) as rig:
        assert "/metrics" not in (await rig.http.get("/openapi.json")).json()["paths"]


def test_openapi_document_is_valid() -> None:
    for name in DOCUMENT["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(DOCUMENT["components"]["schemas"][name])
    refs = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT)))
    assert refs == set(DOCUMENT["components"]["schemas"]) - {"StreamOptions"} and DOCUMENT["openapi"] == "3.1.0"


def test_validators_reject_undescribed_members() -> None:
    answer = {"object": "list", "data": []}
    validator("Models").validate(answer)
    with pytest.raises(jsonschema.ValidationError):
        validator("Models").validate({**answer, "more": 1})
    with pytest.raises(jsonschema.ValidationError):
        check_request("/v1/completions", {"prompt": "a", "temprature": 1})


@pytest.mark.parametrize(
    ("field", "least", "greatest", "refused"),
    [
        ("stop_token_ids", [0, 1.0], [2**31 - 1], [[-1], [2**31], [1.5]]),
        ("allowed_token_ids", [0], [255], [[-1], [2**31]]),
        ("logit_bias", {"0": 1}, {"0000000255": 1}, [{"-1": 1}, {"1.0": 1}, {"": 1}, {"0" * 11: 1}, {"the": 1}]),
    ],
)
async def test_document_bounds_token_ids_as_the_router_does(
    field: str, least: Any, greatest: Any, refused: list[Any]
) -> None:
    async with router_rig() as rig:
        for value in (least, greatest):
            body = {"prompt": "a", "max_tokens": 1, field: value}
            check_request("/v1/completions", body)
            assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
        for value in refused:
            body = {"prompt": "a", "max_tokens": 1, field: value}
            with pytest.raises(jsonschema.ValidationError):
                check_request("/v1/completions", body)
            assert (await rig.http.post("/v1/completions", json=body)).status_code == 400


async def test_docs_page_loads_nothing_from_other_hosts() -> None:
    async with router_rig(api_key=("k",)) as rig:
        answer = await rig.http.get("/docs")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"(https?:)?//\w", answer.text.replace("<!doctype", ""))


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "é"}),
    ("/v1/completions", {"prompt": "é", "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "é", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}, "stop": ":"}),
    ("/invocations", {"prompt": "a"}),
    ("/invocations", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES, "stop_sequences": ["r:"]}),
    ("/v1/responses", {"input": "é"}),
    ("/v1/responses", {"input": "é", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("/inference/v1/generate", {"token_ids": [97, 98], "sampling_params": {"logprobs": 1, "max_tokens": 9}}),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}, "stream_options": {"include_usage": True}}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[f"{path} {sorted(body)}" for path, body in STREAMS])
async def test_answers_and_events_match_the_openapi_document(path: str, body: dict[str, Any]) -> None:
    length = {"/v1/responses": "max_output_tokens", "/inference/v1/generate": "priority"}.get(path, "max_tokens")
    async with router_rig([FakeScheduler(step_s=0.002)]) as rig:
        whole = {**body, length: 9, "stream": True}
        check_request(path, whole)
        answer = await rig.http.post(path, json=whole, headers={"x-quire-timings": "1"})
        assert answer.status_code == 200 and len(check_events(path, answer.text)) > 2
        plain = {name: value for name, value in whole.items() if name not in ("stream", "stream_options")}
        check_request(path, plain)
        assert (await rig.http.post(path, json=plain, headers={"x-quire-timings": "1"})).status_code == 200
