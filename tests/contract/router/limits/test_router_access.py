"""Every route and method requires its scope; limits and admin routes work over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.routing import Route

from quire.v1 import inference_pb2 as ib
from quire_common.errors import PermissionDenied, from_rpc_error
from quire_common.identity.watched_files import POLL_S
from quire_router.front.http.open_paths import OPEN_PATHS
from quire_router.limits.rate_limits import RateLimits
from tests.certificates import replace
from tests.fakes.router.router_rig import RouterRig, router_rig

INFERENCE, METRICS, ADMIN = "key-of-a-client", "key-of-a-scraper", "key-of-an-operator"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    entries = "".join(
        f"- {{name: {scope}, sha256: {hashlib.sha256(key.encode()).hexdigest()}, scopes: [{scope}], {limits}}}\n"
        for scope, key, limits in (
            ("inference", INFERENCE, "requests_per_minute: 3, tokens_per_minute: 100"),
            ("metrics", METRICS, "tokens_per_minute: 0"),
            ("admin", ADMIN, "tokens_per_minute: 0"),
        )
    )
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{entries}")
    return str(file)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys_file(path: Path, *keys: str, **fields: Any) -> None:
    """Write a key file of one client, alice, who has all these keys."""
    entries = [{"name": "alice", "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields} for key in keys]
    replace(path, yaml.safe_dump({"keys": entries}).encode())


async def test_a_key_is_rotated_with_an_overlap_and_no_request_fails(tmp_path: Path) -> None:
    """At first the old key alone, then both, then the new one alone. Meanwhile the client changes its key."""
    file = tmp_path / "keys.yaml"
    keys_file(file, "old")
    async with router_rig(api_key_file=str(file)) as rig:

        async def status(key: str) -> int:
            body = {"model": "fake", "prompt": "a", "max_tokens": 1}
            return (await rig.http.post("/v1/completions", json=body, headers=bearer(key))).status_code

        async def becomes(key: str, wanted: int, other: str) -> None:
            """Wait until the key has this status; the other one is let in all the while."""
            deadline = time.monotonic() + 30
            while await status(key) != wanted:
                assert await status(other) == 200 and time.monotonic() < deadline
                await asyncio.sleep(0.02)

        assert (await status("old"), await status("new")) == (200, 401)
        keys_file(file, "old", "new")
        await becomes("new", 200, other="old")
        assert await status("old") == 200
        keys_file(file, "new")
        await becomes("old", 401, other="new")
        file.write_text("keys: [")
        await asyncio.sleep(3 * POLL_S)
        assert (await status("new"), await status("old")) == (200, 401), "a bad file changes nothing"
        call = rig.inference.ListModels(ib.ListModelsRequest(), metadata=(("authorization", "Bearer new"),))
        assert (await call).models


async def test_weight_of_the_key_goes_to_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"heavy").hexdigest()
    file.write_text(f"keys:\n- {{name: heavy, sha256: {digest}, weight: 7}}\n")
    async with router_rig(api_key_file=str(file), api_key=("light",)) as rig:
        for key in ("heavy", "light"):
            rig.http.headers.update(bearer(key))
            assert (await rig.complete("a", max_tokens=1)).status_code == 200
            request = ib.GenerateRequest(text="a", max_tokens=1)
            async for _ in rig.inference.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
                pass
    assert [submit.context.tenant_weight for submit in rig.scheduler.submits] == [7, 7, 0, 0], "0 is 1"
    assert len({submit.context.tenant for submit in rig.scheduler.submits}) == 2


def admin_client(rig: RouterRig) -> httpx.AsyncClient:
    assert rig.router.admin.http is not None
    return httpx.AsyncClient(base_url=f"http://{rig.router.admin.http.address}", timeout=60, trust_env=False)


async def test_rate_limited_key_may_still_cancel(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        rig.http.headers.update(bearer(INFERENCE))
        rig.scheduler.gate.clear()
        body = {"model": "fake", "input": "a", "background": True}
        told = (await rig.http.post("/v1/responses", json=body)).json()
        for _ in range(3):
            limited = await rig.http.post("/v1/responses", json={})
        assert limited.status_code == 429
        cancelled = await rig.http.post(f"/v1/responses/{told['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")


async def test_reading_and_deleting_a_kept_response_count_as_requests(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        rig.http.headers.update(bearer(INFERENCE))
        body = {"model": "fake", "input": "a", "max_output_tokens": 1}
        told = (await rig.http.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{told['id']}"
        read = await rig.http.get(path)
        assert (read.status_code, read.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        assert (await rig.http.get("/v1/responses/resp_unknown")).status_code == 404
        for method in ("GET", "DELETE", "HEAD"):
            refused = await rig.http.request(method, path)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1, method
        assert (await rig.http.post(f"{path}/cancel")).status_code == 400  # free: it has ended


async def test_every_route_of_both_ports_requires_its_scope(key_file: str) -> None:
    async with (
        router_rig(api_key_file=key_file, metrics_listen="127.0.0.1:0", metrics_on_main=True) as rig,
        admin_client(rig) as admin,
    ):
        for client, routes, own in (
            (rig.http, rig.router.routes.routes, INFERENCE),
            (admin, rig.router.admin.routes.routes, ADMIN),
        ):
            walked = 0
            for route in routes:
                assert isinstance(route, Route)
                for method in route.methods or ():
                    if route.path in OPEN_PATHS:
                        continue
                    walked += 1
                    right = METRICS if route.path == "/metrics" else own
                    right = ADMIN if route.path.startswith("/console/") else right
                    assert (await client.request(method, route.path)).status_code == 401, route.path
                    for key in {INFERENCE, METRICS, ADMIN} - {right}:
                        answer = await client.request(method, route.path, headers=bearer(key))
                        assert answer.status_code == 403, (route.path, key)
                    async with client.stream(method, route.path, headers=bearer(right)) as answer:  # one has no end
                        assert answer.status_code not in (401, 403), route.path
            assert walked > 4
            assert (await client.get("/nothing")).status_code == 401
            assert {(await client.get(path)).status_code for path in ("/livez", "/health", "/readyz")} <= {200, 503}


async def test_every_grpc_method_except_health_requires_a_key(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig, grpc.aio.insecure_channel(rig.grpc_address) as channel:

        def services(key: str) -> list[str]:
            # An asyncio client may report INTERNAL for a refusal that overtakes its own first message
            # (github.com/grpc/grpc/issues/36066); the synchronous one reports the refusal.
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            with grpc.insecure_channel(rig.grpc_address) as synchronous:
                answers = reflection_pb2_grpc.ServerReflectionStub(synchronous).ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
                )
                return [service.name for answer in answers for service in answer.list_services_response.service]

        for key, code in (("", "UNAUTHENTICATED"), ("nope", "UNAUTHENTICATED"), (ADMIN, "PERMISSION_DENIED")):
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(services, key)
            assert refused.value.code().name == code
        found = await asyncio.to_thread(services, INFERENCE)
        assert "quire.v1.Inference" in found
        for path in ("/quire.v1.Inference/Generate", "/quire.v1.Inference/ListModels"):
            for metadata, code in (
                ((), "UNAUTHENTICATED"),
                ((("authorization", f"Bearer {ADMIN}"),), "PERMISSION_DENIED"),
            ):
                call: Any = channel.unary_unary(path)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", metadata=metadata)
                assert caught.value.code().name == code, path
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"") == b"\x08\x01"


async def test_rate_limited_key_gets_retry_after(key_file: str) -> None:
    async with router_rig(api_key_file=key_file) as rig:
        rig.http.headers.update(bearer(INFERENCE))
        assert (await rig.http.get("/v1/models")).headers.get("x-ratelimit-limit-requests") is None
        first = await rig.complete("ab", max_tokens=3)
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-tokens"] == "100"
        second = await rig.complete("ab", max_tokens=3)
        prompt = second.json()["usage"]["prompt_tokens"]
        assert second.headers["x-ratelimit-remaining-tokens"] == str(100 - prompt - 3)
        third = await rig.complete("ab", max_tokens=3, stream=True)
        assert third.status_code == 200 and third.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await rig.complete("ab", max_tokens=3)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "RATE_LIMITED"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        metadata = (("authorization", f"Bearer {INFERENCE}"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [a async for a in rig.inference.Generate(ib.GenerateRequest(text="a", max_tokens=1), metadata=metadata)]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(rig.scheduler.submits) == 3
        # Reading costs nothing.
        assert (await rig.http.get("/v1/models")).status_code == 200


async def test_answer_tokens_are_charged_and_may_overdraw_the_limit() -> None:
    async with router_rig(tokens_per_minute=60) as rig:
        assert (await rig.complete("ab", max_tokens=80)).status_code == 200
        refused = await rig.complete("ab", max_tokens=1)
        assert refused.status_code == 429 and "60 tokens per minute" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0" and int(refused.headers["retry-after"]) > 20


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The charges of one request, in order."""
    found: list[int] = []
    monkeypatch.setattr(RateLimits, "charge", lambda _limits, _tenant, tokens: found.append(tokens))
    return found


async def test_truncated_prompt_tokens_are_charged(charges: list[int]) -> None:
    async with router_rig() as rig:
        for prompt in ("x" * 100, [65] * 100, "x" * 100):
            charges.clear()
            answer = await rig.complete(prompt, truncate_prompt_tokens=10, max_tokens=3, ignore_eos=True)
            assert answer.json()["usage"]["prompt_tokens"] == 10
            assert sum(charges) == 103
        charges.clear()
        request = ib.GenerateRequest(text="x" * 100, truncate_prompt_tokens=10, max_tokens=3, ignore_eos=True)
        assert [answer async for answer in rig.inference.Generate(request)]
        assert sum(charges) == 103
        charges.clear()
        beams = await rig.complete("x" * 100, truncate_prompt_tokens=10, use_beam_search=True, n=1, max_tokens=1)
        assert beams.status_code == 200 and sum(charges) == 100 + beams.json()["usage"]["completion_tokens"]


async def test_tokenize_and_render_requests_are_charged(charges: list[int]) -> None:
    text, chat = "x" * 100, [{"role": "user", "content": "x" * 100}]
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": text},
        "/detokenize": {"tokens": [65] * 100},
        "/v1/completions/render": {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 3},
        "/v1/chat/completions/render": {"messages": chat, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": chat, "model": "fake"},
    }
    async with router_rig() as rig:
        for path, body in bodies.items():
            charges.clear()
            answer = await rig.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert 100 <= sum(charges) < 130, path
        counted = sum(charges)
        charges.clear()
        answer = await rig.http.post("/tokenize", json={"messages": chat})
        assert sum(charges) == answer.json()["count"] == counted


async def test_too_long_prompt_is_charged_up_to_the_context_length(charges: list[int]) -> None:
    async with router_rig() as rig:
        (model,) = rig.router.fleet.models()
        assert (await rig.complete("x" * 1_000_000, max_tokens=3)).status_code == 400
        assert sum(charges) == model.max_model_len


async def test_without_keys_admin_routes_accept_only_local_requests_without_origin() -> None:
    async with router_rig(metrics_listen="127.0.0.1:0") as rig, admin_client(rig) as admin:
        for path in ("/pause", "/drain", "/resume"):
            refused = await admin.post(path, headers={"Origin": "http://127.0.0.1:3000"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "ADMIN_NEEDS_KEY")
            for peer in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::7", "testclient"):
                away = httpx.ASGITransport(rig.router.admin.routes, client=(peer, 5))
                async with httpx.AsyncClient(transport=away, base_url="http://router") as client:
                    with pytest.raises(PermissionDenied, match="its own machine"):
                        await client.post(path)
            assert rig.router.admission.open
        for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            near = httpx.ASGITransport(rig.router.admin.routes, client=(peer, 5))
            async with httpx.AsyncClient(transport=near, base_url="http://router") as client:
                assert (await client.post("/pause")).json()["paused"]


async def test_admin_routes_pause_drain_and_resume(key_file: str) -> None:
    async with router_rig(metrics_listen="127.0.0.1:0") as rig, admin_client(rig) as admin:
        assert (await admin.post("/pause")).json() == {"paused": True, "in_flight": 0}
        assert (await rig.http.get("/health")).status_code == 503
        refused = await rig.complete("a", max_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert (await admin.post("/resume")).json() == {"paused": False, "in_flight": 0}
        assert (await rig.complete("a", max_tokens=1)).status_code == 200
        assert (await admin.post("/drain")).json() == {"paused": True, "in_flight": 0}
        assert (await admin.get("/is_sleeping")).json() == {"is_sleeping": False}
        unsupported = await admin.post("/sleep")
        assert unsupported.status_code == 400 and unsupported.json()["error"]["code"] == "ADMIN_UNSUPPORTED"
        assert "quire_router_rate_limits_shared" in (await admin.get("/metrics")).text


async def test_key_of_some_models_sees_and_asks_for_no_other(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys_file(file, "limited", models=["small"])
    async with router_rig(api_key_file=str(file), api_key=("open",), served_model_name=("big", "small")) as rig:
        seen: dict[str, list[str]] = {}
        for key in ("open", "limited"):
            rig.http.headers.update(bearer(key))
            listed = (await rig.http.get("/v1/models")).json()["data"]
            seen[key] = [model["id"] for model in listed]
            metadata = (("authorization", f"Bearer {key}"),)
            told = await rig.inference.ListModels(ib.ListModelsRequest(), metadata=metadata)
            assert [model.name for model in told.models] == seen[key]
        assert seen == {"open": ["big", "small"], "limited": ["small"]}
        messages = [{"role": "user", "content": "a"}]
        asked: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "a", "max_tokens": 1},
            "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
            "/v1/messages": {"messages": messages, "max_tokens": 1},
            "/v1/messages/count_tokens": {"messages": messages},
            "/v1/responses": {"input": "a", "max_output_tokens": 1},
            "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in asked.items():
            answers = [await rig.http.post(path, json={"model": model, **body}) for model in ("small", "big", "none")]
            assert [answer.status_code for answer in answers] == [200, 403, 404], path
            if path != "/v1/messages":  # Anthropic's errors have no code
                assert "MODEL_NOT_ALLOWED" in answers[1].text or "may not use the model `big`" in answers[1].text
            assert "big" not in answers[2].text, "a model that the key may not use is not listed"
        assert (await rig.http.get("/v1/models/big")).status_code == 403
        # Without a name the first model that the key may use is meant.
        unnamed = await rig.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert unnamed.json()["model"] == "small"
        call = rig.inference.Generate(ib.GenerateRequest(text="a", model="big", max_tokens=1), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert from_rpc_error(caught.value).code == "MODEL_NOT_ALLOWED"
