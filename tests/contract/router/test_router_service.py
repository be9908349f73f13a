"""Clients of OpenAI's API and of quire.v1.Inference get right answers over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import grpc
import pytest

from quire.channel import has_begun
from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire.v1 import inference_pb2_grpc
from quire_common.columns import i32, pack_i32
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


def events(body: str) -> list[Any]:
    """The data of every event; the last must be [DONE]."""
    frames = [frame for frame in body.split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[len("data: ") :]) for frame in frames[:-1]]


async def test_completion_has_all_members() -> None:
    async with router_rig([FakeScheduler(cached_tokens=3)]) as rig:
        response = await rig.complete("hello", max_tokens=8, temperature=0)
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "text_completion" and body["model"] == "fake" and body["system_fingerprint"] is None
        assert body["id"] == f"cmpl-{response.headers['x-request-id']}"
        assert body["choices"] == [
            {"index": 0, "text": "hellohel", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        submit = rig.scheduler.submits[0]
        assert submit.context.request_id == response.headers["x-request-id"]
        assert submit.sequence.sampling.temperature == 0
        assert 590_000 < submit.context.time_left_ms <= 600_000
        assert not submit.context.deadline_unix_ms, "it would depend on two machines' clocks"
        assert not rig.scheduler.aborts and not rig.tokenizer.open_handles


async def test_defaults_are_those_of_openai() -> None:
    async with router_rig([FakeScheduler(max_model_len=40)]) as rig:
        assert (await rig.complete("ab")).json()["usage"]["completion_tokens"] == 16
        chat = (await rig.chat("ab")).json()
        assert chat["usage"]["total_tokens"] == 40  # the rest of the context
        assert rig.scheduler.submits[0].sequence.sampling.temperature == 1.0
        seeds = {submit.sequence.sampling.seed for submit in rig.scheduler.submits}
        assert len(seeds) == 2 and 0 not in seeds  # picked by the router


async def test_chat_completion_has_all_members() -> None:
    async with router_rig() as rig:
        body = (await rig.chat([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], max_tokens=9)).json()
        assert body["object"] == "chat.completion"
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "user: x\ny", "refusal": None}
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None


async def test_completion_stream_has_whole_characters_and_usage() -> None:
    async with router_rig() as rig:
        response = await rig.complete("aé😀", max_tokens=7, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response.text)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "aé😀"
        assert "�" not in response.text  # never half a character
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert all(c["usage"] is None for c in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 7
        assert len({c["id"] for c in [*chunks, last]}) == 1


async def test_chat_stream_begins_with_the_role() -> None:
    async with router_rig() as rig:
        response = await rig.chat("hi", max_tokens=4, stream=True, n=2)
        first, second, *rest = events(response.text)
        for index, opening in enumerate((first, second)):
            assert opening["object"] == "chat.completion.chunk"
            assert opening["choices"][0]["index"] == index
            assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert opening["choices"][0]["finish_reason"] is None
        texts = {0: "", 1: ""}
        for chunk in rest:
            assert "usage" not in chunk
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
        assert texts == {0: "user", 1: "user"}


async def test_continuous_usage_counts_every_token() -> None:
    async with router_rig() as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await rig.complete("é", max_tokens=4, stream=True, stream_options=options)
        counts = [e["usage"]["completion_tokens"] for e in events(response.text)]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4


async def test_no_chunk_counts_tokens_if_none_are_generated() -> None:
    async with router_rig() as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await rig.complete("ab", max_tokens=0, echo=True, stream=True, stream_options=options)
        content, *_, closing = (event["usage"] for event in events(response.text))
        assert content["completion_tokens"] == closing["completion_tokens"] == 0
        assert content["total_tokens"] == closing["total_tokens"] == 2


async def test_role_chunk_counts_no_tokens() -> None:
    async with router_rig() as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await rig.chat("hi", max_tokens=4, stream=True, stream_options=options)
        first = events(response.text)[0]
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert first["usage"]["completion_tokens"] == 0
        assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] > 0


async def test_siblings_share_the_seed_and_have_different_sample_indices() -> None:
    async with router_rig() as rig:
        body = (await rig.complete(["ab", "cd"], max_tokens=2, n=2, seed=-7)).json()
        assert [c["text"] for c in body["choices"]] == ["ab", "ab", "cd", "cd"]
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 4 and body["usage"]["completion_tokens"] == 8
        sampling = [submit.sequence.sampling for submit in rig.scheduler.submits]
        assert [s.sample for s in sampling] == [0, 1, 0, 1]
        assert {s.seed for s in sampling} == {2**64 - 7}


async def test_every_form_of_prompt_is_accepted() -> None:
    async with router_rig() as rig:
        for prompt, wanted in (
            ("ab", ["abab"]),
            (["ab", "c"], ["abab", "cccc"]),
            ([97, 98], ["abab"]),
            ([[97], [98, 99]], ["aaaa", "bcbc"]),
        ):
            body = (await rig.complete(prompt, max_tokens=4)).json()
            assert [c["text"] for c in body["choices"]] == wanted, prompt
        echoed = (await rig.complete([[97, 98]], max_tokens=4, echo=True)).json()
        assert echoed["choices"][0]["text"] == "ababab"
        streamed = await rig.complete("ab", max_tokens=4, echo=True, stream=True)
        assert "".join(e["choices"][0]["text"] for e in events(streamed.text)) == "ababab"


async def test_completion_logprobs_have_openais_shape() -> None:
    async with router_rig() as rig:
        wanted = {
            "text_offset": [0, 1, 1],
            "token_logprobs": [-1.0, -2.0, -3.0],
            "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
            "top_logprobs": [
                {"a": -1.0, "b": -2.0},
                {"bytes:\\xc3": -2.0, "bytes:\\xc4": -3.0},
                {"bytes:\\xa9": -3.0, "bytes:\\xaa": -4.0},
            ],
        }
        body = (await rig.complete("aé", max_tokens=3, logprobs=2)).json()
        assert body["choices"][0]["logprobs"] == wanted
        assert rig.tokenizer.token_bytes_calls == 1
        streamed = events((await rig.complete("aé", max_tokens=3, logprobs=2, stream=True)).text)
        joined: dict[str, list[Any]] = {key: [] for key in wanted}
        for event in streamed:
            for key, values in event["choices"][0]["logprobs"].items():
                joined[key] += values
        assert joined == wanted
        assert rig.tokenizer.token_bytes_calls == 1  # the second time from the cache
        alone = (await rig.complete("a", max_tokens=1, logprobs=0)).json()["choices"][0]["logprobs"]
        assert alone["top_logprobs"] == [{"a": -1.0}]


async def test_chat_logprobs_have_openais_shape() -> None:
    async with router_rig() as rig:
        body = (await rig.chat("x", max_tokens=2, logprobs=True, top_logprobs=1)).json()
        assert body["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [{"token": token, "logprob": logprob, "bytes": list(token.encode())}],
                }
                for token, logprob in (("u", -1.0), ("s", -2.0))
            ]
        }
        plain = (await rig.chat("x", max_tokens=1, logprobs=True)).json()
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_stop_string_cuts_text_usage_and_logprobs() -> None:
    async with router_rig([FakeScheduler(tokens_per_step=4)]) as rig:
        body = (await rig.complete("one two three", max_tokens=500, stop=["x", " tw"], logprobs=0)).json()
        choice = body["choices"][0]
        assert choice["text"] == "one" and choice["finish_reason"] == "stop" and choice["stop_reason"] == " tw"
        assert body["usage"]["completion_tokens"] == 6
        assert choice["logprobs"]["tokens"] == list("one tw")
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 30)
        assert rig.scheduler.aborts == [rig.scheduler.submits[0].handle]
        assert not rig.scheduler.running and not rig.tokenizer.open_handles
        kept = (await rig.complete("abcd", max_tokens=50, stop="bc", include_stop_str_in_output=True)).json()
        assert kept["choices"][0]["text"] == "abc"
        streamed = events((await rig.complete("one two", max_tokens=50, stop=" tw", stream=True)).text)
        assert "".join(e["choices"][0]["text"] for e in streamed) == "one"
        assert streamed[-1]["choices"][0]["stop_reason"] == " tw"


async def test_stop_reason_names_stop_tokens_of_the_request_only() -> None:
    async with router_rig() as rig:
        stopped = (await rig.complete("abc", max_tokens=50, stop_token_ids=[99])).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("ab", "stop", 99)
        ended = (await rig.complete([97, 256], max_tokens=50)).json()["choices"][0]
        assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("a", "stop", None)
        ignored = (await rig.complete([97, 256], max_tokens=5, ignore_eos=True)).json()["choices"][0]
        assert (ignored["text"], ignored["finish_reason"]) == ("aaa", "length")


async def test_token_ids_and_timings_are_returned_on_request() -> None:
    async with router_rig() as rig:
        rig.http.headers["x-quire-timings"] = "1"
        body = (await rig.complete("abc", max_tokens=4, return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == [97, 98, 99, 97]
        assert body["choices"][0]["prompt_token_ids"] == [97, 98, 99]
        hops = {(t["service"], t["phase"]) for t in body["quire_timings"]}
        assert hops == {
            ("router", "parse"),
            ("router", "tokenize"),
            ("router", "place"),
            ("router", "total"),
            ("tokenizer", "encode"),
            ("tokenizer", "detokenize"),
            ("scheduler", "queue"),
            ("worker", "decode"),
        }
        *chunks, last = events((await rig.chat("abc", max_tokens=4, return_token_ids=True, stream=True)).text)
        assert chunks[0]["prompt_token_ids"] == list(b"user: abc\nassistant: ")
        ids = [token_id for c in chunks for token_id in c["choices"][0].get("token_ids", [])]
        assert ids == list(b"user")
        assert last["choices"] == [] and last["quire_timings"]


async def test_request_ids_of_clients_are_returned() -> None:
    async with router_rig() as rig:
        headers = {"X-Request-Id": "mine-1"}
        response = await rig.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "body"}, headers=headers
        )
        assert response.headers["x-request-id"] == "mine-1" and response.json()["id"] == "cmpl-mine-1"
        named = await rig.complete("a", max_tokens=1, request_id="body-1")
        assert named.headers["x-request-id"] == "body-1"
        forged = await rig.http.get("/version", headers={"X-Request-Id": "x" * 500})
        assert len(forged.headers["x-request-id"]) == 32


async def test_models_are_listed_under_their_served_names() -> None:
    async with router_rig(served_model_name=("small", "tiny")) as rig:
        listed = (await rig.http.get("/v1/models")).json()
        assert [(m["id"], m["root"], m["max_model_len"]) for m in listed["data"]] == [
            ("small", "fake", 4096),
            ("tiny", "fake", 4096),
        ]
        body = (await rig.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})).json()
        assert body["model"] == "tiny"
        assert (await rig.complete("a")).status_code == 404  # the model's own name is not served then


async def test_status_routes_answer() -> None:
    async with router_rig() as rig:
        for live in ("/livez", "/health/liveness"):
            assert (await rig.http.get(live)).json() == {"live": True}
        ready = (await rig.http.get("/readyz")).json()
        assert ready["ready"] is True
        for alias in ("/ready", "/health/readiness"):
            assert (await rig.http.get(alias)).json() == ready
        assert (await rig.http.get("/health")).status_code == 200
        assert (await rig.http.post("/ping")).status_code == 200
        assert (await rig.http.get("/version")).json()["version"]
        assert (await rig.http.get("/load")).json()["server_load"] == 0
        await rig.complete("a", max_tokens=3)
        metrics = (await rig.http.get("/metrics")).text
        assert 'quire_router_requests_total{code="200",route="/v1/completions"}' in metrics
        assert "quire_router_inter_token_latency_seconds_bucket" in metrics


async def test_grpc_accepts_every_form_of_prompt() -> None:
    async with router_rig() as rig:
        for prompt, wanted in (
            ({"text": "ab"}, "ababa"),
            ({"token_ids": ib.TokenIds(ids=pack_i32([99]))}, "ccccc"),
            ({"chat": ib.Chat(messages_json='[{"role":"user","content":"x"}]')}, "user:"),
        ):
            request = ib.GenerateRequest(max_tokens=5, return_token_ids=True, return_timings=True, **prompt)
            answers = [answer async for answer in rig.inference.Generate(request)]
            assert "".join(a.text for a in answers) == wanted
            assert b"".join(a.token_ids for a in answers) == pack_i32(list(wanted.encode()))
            assert [a.finish_reason for a in answers if a.finish_reason] == [pb.FINISH_REASON_LENGTH]
            assert answers[-1].usage.completion_tokens == 5 and not answers[0].HasField("usage")
            assert {t.service for t in answers[-1].timings} == {"router", "tokenizer", "scheduler", "worker"}
            assert len(i32(answers[0].prompt_token_ids)) == answers[-1].usage.prompt_tokens


async def test_grpc_supports_logprobs_siblings_and_stop_strings() -> None:
    async with router_rig() as rig:
        request = ib.GenerateRequest(
            text="abc", max_tokens=20, n=2, stop=["ca"], sampling=pb.SamplingParams(temperature=1, logprobs=1, seed=5)
        )
        answers = [answer async for answer in rig.inference.Generate(request)]
        for index in (0, 1):
            mine = [a for a in answers if a.index == index]
            assert "".join(a.text for a in mine) == "ab"
            assert mine[-1].stop_string == "ca" and mine[-1].finish_reason == pb.FINISH_REASON_STOP
            logprobs = [entry for a in mine for entry in a.logprobs]
            assert [entry.token for entry in logprobs] == [b"a", b"b", b"c", b"a"]
            assert [entry.text_offset for entry in logprobs] == [0, 1, 2, 3]
            assert logprobs[0].top[0].token == b"a"
        assert [s.sequence.sampling.sample for s in rig.scheduler.submits] == [0, 1]
        assert {s.sequence.sampling.seed for s in rig.scheduler.submits} == {5}


async def test_grpc_errors_have_code_and_fix() -> None:
    async with router_rig() as rig:
        for fields, status, code in (
            ({"text": "a", "model": "other"}, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
            ({}, grpc.StatusCode.INVALID_ARGUMENT, "MISSING_FIELD"),
            ({"text": "a", "max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE"),
            ({"text": "a", "stop": ["x"] * 100_000}, grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_ITEMS"),
            ({"text": "a", "adapter": "lora"}, grpc.StatusCode.UNIMPLEMENTED, "PARAMETER_UNSUPPORTED"),
            (
                {"text": "a", "sampling": pb.SamplingParams(temperature=float("nan"))},
                grpc.StatusCode.INVALID_ARGUMENT,
                "BAD_SAMPLING_PARAMETER",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.inference.Generate(ib.GenerateRequest(**fields)).read()
            assert caught.value.code() is status
            details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
            assert isinstance(details, bytes) and code.encode() in details
        listed = await rig.inference.ListModels(ib.ListModelsRequest())
        assert [(m.name, m.max_model_len) for m in listed.models] == [("fake", 4096)]


async def test_a_grpc_client_learns_that_its_call_is_begun_before_anything_came_of_it() -> None:
    """The client can then tell a call that was cancelled before it began from one that ran."""
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        call = rig.inference.Generate(ib.GenerateRequest(text="a", max_tokens=1, request_id="mine"))
        told = dict(await asyncio.wait_for(call.initial_metadata(), 30))
        assert told["x-request-id"] == "mine" and has_begun(told.items())
        rig.scheduler.gate.set()
        assert [response.request_id async for response in call] == ["mine"]
        refused = rig.inference.Generate(ib.GenerateRequest(text="a", max_tokens=0))
        assert not has_begun(await asyncio.wait_for(refused.initial_metadata(), 30))
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens"):
            await refused.read()


async def test_a_call_that_its_router_cut_off_is_known_to_have_begun() -> None:
    async with contextlib.AsyncExitStack() as life:
        rig = await life.enter_async_context(router_rig())
        channel = grpc.aio.insecure_channel(rig.grpc_address)
        rig.scheduler.gate.clear()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ib.GenerateRequest(text="a", max_tokens=1))
        await asyncio.wait_for(rig.scheduler.submitted.wait(), 30)
    # The code depends on what the client sees first: the end of the call, or that of the connection.
    assert await call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert has_begun(await call.initial_metadata())
    await channel.close()
