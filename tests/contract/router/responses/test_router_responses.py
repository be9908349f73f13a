"""OpenAI's Responses API over real sockets: objects, typed events, conversations by id, background, bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis import Redis

from quire_router.config import RouterConfig
from quire_router.front.http.responses import background
from quire_router.front.http.responses.format import ResponsesFormat
from quire_router.front.http.responses.store import MemoryStore, RedisStore, StoreOutcome, make_store
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
PROMPT = "user: hi\nassistant: "


async def create(rig: RouterRig, given: Any = "hi", **fields: Any) -> Any:
    body = {"model": "fake", "input": given, "max_output_tokens": 8, **fields}
    return await rig.http.post("/v1/responses", json=body)


def events(text: str) -> list[Any]:
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        first, second = frame.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert data["type"] == first.removeprefix("event: ")
        found.append(data)
    assert [data["sequence_number"] for data in found] == list(range(len(found)))
    return found


async def test_response_has_all_members_and_is_kept() -> None:
    async with router_rig([FakeScheduler(cached_tokens=3)]) as rig:
        answer = await create(rig, temperature=0.5, metadata={"a": "b"})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["id"].startswith("resp_") and told["object"] == "response" and told["model"] == "fake"
        assert told["status"] == "incomplete" and told["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = told["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
        text = {"type": "output_text", "text": "user: hi", "annotations": [], "logprobs": []}
        assert item["content"] == [text]
        assert told["usage"] == {
            "input_tokens": len(PROMPT),
            "input_tokens_details": {"cached_tokens": 3},
            "output_tokens": 8,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(PROMPT) + 8,
        }
        assert (told["temperature"], told["metadata"], told["store"]) == (0.5, {"a": "b"}, True)
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).json() == told


async def test_events_are_typed_and_numbered() -> None:
    async with router_rig([FakeScheduler(step_s=0.005, finish=1)]) as rig:
        told = events((await create(rig, "é😀", stream=True, max_output_tokens=14)).text)
        names = [data["type"].removeprefix("response.") for data in told]
        deltas = [data for data in told if data["type"] == "response.output_text.delta"]
        assert len(deltas) >= 8 and "".join(data["delta"] for data in deltas) == "user: é😀\na"
        assert [name for name in names if name != "output_text.delta"] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        by_name = dict(zip(names, told, strict=True))
        assert by_name["created"]["response"]["status"] == "in_progress"
        assert by_name["output_text.done"]["text"] == "user: é😀\na"
        done = by_name["completed"]["response"]
        assert done["output"] == [by_name["output_item.done"]["item"]] and done["usage"]["output_tokens"] == 14
        assert {data["item_id"] for data in deltas} == {done["output"][0]["id"]}
        # Who has heard the last event may ask at once.
        assert (await rig.http.get(f"/v1/responses/{done['id']}")).json() == done


async def test_logprobs_are_returned_if_included() -> None:
    async with router_rig() as rig:
        included = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        include = {"include": included, "top_logprobs": 2, "max_output_tokens": 2}
        told = (await create(rig, **include)).json()["output"][0]["content"][0]["logprobs"]
        assert [(t["token"], t["logprob"], len(t["top_logprobs"])) for t in told] == [("u", -1, 2), ("s", -2, 2)]
        streamed = events((await create(rig, stream=True, **include)).text)
        assert [t["token"] for data in streamed for t in data.get("logprobs", ())][:2] == ["u", "s"]


async def test_previous_response_id_continues_a_conversation() -> None:
    async with router_rig([FakeScheduler(finish=1)]) as rig:
        first = (await create(rig, "hi", instructions="be nice", max_output_tokens=3)).json()
        second = (await create(rig, "and?", previous_response_id=first["id"], max_output_tokens=60)).json()
        # Instructions are not carried over; what was asked and answered is.
        assert second["output"][0]["content"][0]["text"].startswith("user: hi\nassistant: sys\nuser: and?\nassistant: ")
        third = (await create(rig, "?", previous_response_id=second["id"])).json()
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


async def test_input_items_of_every_text_kind_are_accepted() -> None:
    async with router_rig() as rig:
        items = [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"role": "user", "content": "c"},
        ]  # fmt: skip
        told = (await create(rig, items, max_output_tokens=80)).json()
        wanted = "system: d\nuser: a\nassistant: b\nuser: c\nassistant: "
        assert told["output"][0]["content"][0]["text"].startswith(wanted)


async def test_reasoning_effort_reaches_the_template_and_the_answer() -> None:
    async with router_rig() as rig:
        asked = {"reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"enable_thinking": True}}
        told = (await create(rig, **asked)).json()
        assert told["reasoning"] == {"effort": "low", "summary": None}
        (render,) = rig.tokenizer.renders
        assert json.loads(render.template_kwargs_json) == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"input": None}, 400, "MISSING_FIELD"),
        ({"input": []}, 400, "MISSING_FIELD"),
        ({"input": [{"type": "function_call_output"}]}, 400, "BAD_TYPE"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "BAD_TYPE"),
        ({"input": [{"type": "computer_call"}]}, 400, "PARAMETER_UNSUPPORTED"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "PARAMETER_UNSUPPORTED"),
        ({"input": [{"role": "boss", "content": "x"}]}, 400, "BAD_ROLE"),
        ({"previous_response_id": "resp_nothing"}, 404, "RESPONSE_NOT_FOUND"),
        ({"previous_response_id": "../x"}, 404, "RESPONSE_NOT_FOUND"),
        ({"tools": [{"type": "function"}]}, 400, "BAD_TOOL"),
        ({"tools": [{"type": "web_search"}]}, 400, "PARAMETER_UNSUPPORTED"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
            400,
            "STRUCTURED_OUTPUT_UNSUPPORTED",
        ),
        ({"tools": [{"type": "function", "name": "f"}]}, 400, "NO_TOOL_PARSER"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "BAD_TYPE"),
        ({"reasoning": {"effort": 3}}, 400, "BAD_TYPE"),
        ({"reasoning": {"summary": "detailed"}}, 400, "PARAMETER_UNSUPPORTED"),
        ({"truncation": "some"}, 400, "BAD_VALUE"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprob"]}, 400, "BAD_VALUE"),
        ({"metadata": "a"}, 400, "BAD_TYPE"),
        ({"metadata": {"a": 1}}, 400, "BAD_TYPE"),
        ({"metadata": {f"{i}": "a" for i in range(17)}}, 400, "TOO_MANY_ITEMS"),
        ({"metadata": {"n" * 65: "a"}}, 400, "TOO_MANY_ITEMS"),
        ({"metadata": {"n": "v" * 513}}, 400, "TOO_MANY_ITEMS"),
        ({"user": {"a": [1]}}, 400, "BAD_TYPE"),
        ({"safety_identifier": "s" * 257}, 400, "TOO_MANY_ITEMS"),
        ({"prompt_cache_key": "s" * 257}, 400, "TOO_MANY_ITEMS"),
        ({"background": True, "store": False}, 400, "BACKGROUND_NEEDS_STORE"),
        ({"background": True, "stream": True}, 400, "PARAMETER_UNSUPPORTED"),
        ({"model": "other"}, 404, "MODEL_NOT_FOUND"),
    ],
)
async def test_bad_requests_are_refused_with_typed_errors(fields: dict[str, Any], status: int, code: str) -> None:
    async with router_rig() as rig:
        answer = await create(rig, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert not rig.scheduler.submits


async def test_metadata_of_the_largest_size_is_accepted_and_returned() -> None:
    metadata = {f"{i:02d}" + "n" * 62: "é" * 512 for i in range(16)}
    async with router_rig() as rig:
        told = (await create(rig, metadata=metadata, user="somebody")).json()
        assert (told["metadata"], told["user"]) == (metadata, "somebody")


async def test_response_with_store_false_is_not_kept() -> None:
    async with router_rig() as rig:
        told = (await create(rig, store=False)).json()
        assert told["store"] is False
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).status_code == 404


def test_several_processes_keep_responses_only_in_redis() -> None:
    # Any of them may be asked for what another one kept.
    assert make_store(RouterConfig(http_workers=2)) is make_store(RouterConfig(http_workers=2, http_worker=1)) is None
    assert make_store(RouterConfig(http_workers=2, redis="redis://127.0.0.1:1/0")) is not None
    assert make_store(RouterConfig()) is not None


async def test_router_without_a_response_store_refuses_its_use() -> None:
    async with router_rig(responses_max_mib=0) as rig:
        told = (await create(rig)).json()
        assert told["store"] is False
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).status_code == 404
        for fields, code in (
            ({"previous_response_id": told["id"]}, "RESPONSES_NOT_KEPT"),
            ({"background": True}, "BACKGROUND_NEEDS_STORE"),
        ):
            refused = await create(rig, **fields)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (400, code, next(iter(fields)))
            assert "--redis" in error["message"]


async def test_deleted_response_is_not_found() -> None:
    async with router_rig() as rig:
        path = f"/v1/responses/{(await create(rig)).json()['id']}"
        told = (await rig.http.delete(path)).json()
        assert told == {"id": path.rpartition("/")[2], "object": "response", "deleted": True}
        assert (await rig.http.get(path)).status_code == 404
        again = await rig.http.delete(path)
        assert again.status_code == 404 and again.json()["error"]["param"] == "response_id"


async def test_response_is_visible_only_to_its_tenant() -> None:
    async with router_rig(api_key=("a", "b")) as rig:
        rig.http.headers["authorization"] = "Bearer a"
        response_id = (await create(rig)).json()["id"]
        other = {"authorization": "Bearer b"}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = await rig.http.request(method, f"/v1/responses/{response_id}{path}", headers=other)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "RESPONSE_NOT_FOUND")
        assert (await rig.http.get(f"/v1/responses/{response_id}")).status_code == 200


async def ended(rig: RouterRig, response_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            told = (await rig.http.get(f"/v1/responses/{response_id}")).json()
            if told["status"] != "in_progress":
                return told
            await asyncio.sleep(0.01)


async def test_background_response_runs_without_its_client() -> None:
    async with router_rig([FakeScheduler(finish=1)]) as rig:
        rig.scheduler.gate.clear()
        told = (await create(rig, background=True)).json()
        assert (told["status"], told["output"], told["background"]) == ("in_progress", [], True)
        early = await create(rig, previous_response_id=told["id"])
        assert (early.status_code, early.json()["error"]["code"]) == (409, "RESPONSE_NOT_ENDED")
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).json()["status"] == "in_progress"
        rig.scheduler.gate.set()
        done = await ended(rig, told["id"])
        assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == "user: hi"
        again = (await rig.http.post(f"/v1/responses/{told['id']}/cancel")).json()
        assert again == done
        assert rig.router.admission.inside == 0


async def test_background_response_is_cancelled() -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        told = (await create(rig, background=True)).json()
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        assert (await rig.http.post(f"/v1/responses/{told['id']}/cancel")).json()["status"] == "cancelled"
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        assert (await ended(rig, told["id"]))["status"] == "cancelled"
        rig.scheduler.gate.set()
        front = (await create(rig, max_output_tokens=1)).json()
        refused = await rig.http.post(f"/v1/responses/{front['id']}/cancel")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "NOT_IN_BACKGROUND")


async def test_response_deleted_while_running_stays_deleted() -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        told = (await create(rig, background=True)).json()
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 60)
        assert (await rig.http.delete(f"/v1/responses/{told['id']}")).json()["deleted"]
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        async with asyncio.timeout(60):
            while rig.router.admission.inside:
                await asyncio.sleep(0.01)
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def until_settled(rig: RouterRig) -> None:
    """Wait until no response runs in the background, and the store has them all."""
    async with asyncio.timeout(60):
        while rig.router.background_runs:
            await asyncio.sleep(0.01)


async def withdraw(rig: RouterRig, response_id: str, way: str) -> None:
    path = f"/v1/responses/{response_id}"
    answer = await (rig.http.delete(path) if way == "delete" else rig.http.post(f"{path}/cancel"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["deleted"] if way == "delete" else answer.json()["status"] == "cancelled"


async def check_withdrawn(rig: RouterRig, response_id: str, way: str) -> None:
    told = await rig.http.get(f"/v1/responses/{response_id}")
    assert told.status_code == 404 if way == "delete" else told.json()["status"] == "cancelled"


@pytest.mark.parametrize(("way", "kept"), [("delete", False), ("cancel", False), ("delete", True)])
async def test_response_withdrawn_after_its_last_token_stays_withdrawn(
    monkeypatch: pytest.MonkeyPatch, way: str, kept: bool
) -> None:
    """Before the store has the answer, and when it has just got it."""
    reached, go, keep = asyncio.Event(), asyncio.Event(), ResponsesFormat.keep

    async def slow(answer: ResponsesFormat) -> StoreOutcome:
        if kept:
            await keep(answer)
        reached.set()
        await go.wait()
        return StoreOutcome.KEPT if kept else await keep(answer)

    monkeypatch.setattr(ResponsesFormat, "keep", slow)
    async with router_rig() as rig:
        told = (await create(rig, background=True)).json()
        await asyncio.wait_for(reached.wait(), 60)
        await withdraw(rig, told["id"], way)
        go.set()
        await until_settled(rig)
        await check_withdrawn(rig, told["id"], way)


@pytest.mark.parametrize("way", ["delete", "cancel"])
async def test_response_withdrawn_by_another_router_stays_withdrawn(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(background, "_POLL_S", 3600.0)
    async with router_rig(redis=redis_server.url) as first, router_rig(redis=redis_server.url) as second:
        first.scheduler.gate.clear()
        told = (await create(first, background=True)).json()
        await asyncio.wait_for(first.scheduler.submitted.wait(), 60)
        await withdraw(second, told["id"], way)
        if way == "delete":
            await check_withdrawn(first, told["id"], way)  # at once, though it has not been told yet
        first.scheduler.gate.set()
        await until_settled(first)
        await check_withdrawn(second, told["id"], way)
        mark = await second.http.get(f"/v1/responses/{told['id']}:cancel")
        assert (mark.status_code, mark.json()["error"]["code"]) == (404, "RESPONSE_NOT_FOUND")


async def test_cancellation_does_not_restore_a_deleted_response(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from a third router, which saw the response just before it was deleted at the second."""
    monkeypatch.setattr(background, "_POLL_S", 3600.0)
    url = redis_server.url
    async with router_rig(redis=url) as first, router_rig(redis=url) as second, router_rig(redis=url) as third:
        first.scheduler.gate.clear()
        told = (await create(first, background=True)).json()
        await asyncio.wait_for(first.scheduler.submitted.wait(), 60)
        store = RedisStore(url, 1 << 20, 60.0)
        seen = await store.get("", told["id"])
        await withdraw(second, told["id"], "delete")
        assert seen is not None
        await store.put("", told["id"], seen)
        await withdraw(third, told["id"], "cancel")
        first.scheduler.gate.set()
        await until_settled(first)
        await check_withdrawn(second, told["id"], "delete")
        await store.close()


async def test_failed_background_response_has_a_typed_error() -> None:
    async with router_rig(request_timeout_s=0.3) as rig:
        rig.scheduler.gate.clear()
        told = await ended(rig, (await create(rig, background=True)).json()["id"])
        assert told["status"] == "failed" and told["error"]["code"] == "server_error"
        assert told["error"]["message"].startswith("REQUEST_TIMEOUT")


async def test_routers_share_responses_in_redis(redis_server: RedisServer) -> None:
    async with router_rig(redis=redis_server.url) as first, router_rig(redis=redis_server.url) as second:
        told = (await create(first)).json()
        assert (await second.http.get(f"/v1/responses/{told['id']}")).json() == told
        went_on = await create(second, "more", previous_response_id=told["id"])
        assert went_on.json()["usage"]["input_tokens"] > told["usage"]["input_tokens"]
        first.scheduler.gate.clear()
        running = (await create(first, background=True)).json()
        await second.http.post(f"/v1/responses/{running['id']}/cancel")
        assert (await ended(second, running["id"]))["status"] == "cancelled"
        redis_server.stop()
        lost = await second.http.get(f"/v1/responses/{told['id']}")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "RESPONSE_STORE_UNAVAILABLE")
        assert (await create(second)).status_code == 200


async def test_memory_store_is_bounded() -> None:
    store = MemoryStore(10, 100.0)
    for name in "abc":
        await store.put("t", name, b"1234")
    assert [await store.get("t", name) for name in "abc"] == [None, b"1234", b"1234"]
    await store.put("t", "b", b"12")
    await store.put("t", "d", b"1234")
    assert [await store.get("t", name) for name in "bcd"] == [b"12", b"1234", b"1234"]
    await store.put("t", "e", b"12345678901")
    assert await store.get("t", "e") is None and await store.get("t", "d") == b"1234"
    assert await store.delete("t", "d") and not await store.delete("t", "d")
    short = MemoryStore(10, 0.0)
    await short.put("t", "a", b"1")
    assert await short.get("t", "a") is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"response": {}, "messages": []}',
        b'{"response": {"id": "a", "status": "completed", "background": 0}, "messages": []}',
        b'{"response": {"id": "a", "status": "completed", "background": false}, "messages": [1]}',
        b'{"response": {"id": "a", "status": "completed", "background": false, "x": %b}, "messages": []}'
        % (b"[" * 300 + b"]" * 300),
    ],
)
async def test_a_kept_value_that_is_no_response_is_not_found(redis_server: RedisServer, value: bytes) -> None:
    async with router_rig(redis=redis_server.url) as rig:
        response_id = (await create(rig)).json()["id"]
        with Redis.from_url(redis_server.url) as redis:
            while not (keys := redis.keys(f"quire:response:*{response_id}")):
                await asyncio.sleep(0.01)  # an answer does not wait for a slow write
            redis.set(keys[0], value)
        answers = [
            await rig.http.get(f"/v1/responses/{response_id}"),
            await create(rig, previous_response_id=response_id),
        ]
        assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [
            (404, "RESPONSE_NOT_FOUND")
        ] * 2
