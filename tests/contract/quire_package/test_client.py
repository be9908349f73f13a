from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import (
    AsyncClient,
    BeamSearchParams,
    ChatPrompt,
    Client,
    InvalidArgument,
    NotFound,
    Overloaded,
    SamplingParams,
    Unavailable,
)
from quire.batch.batch_file import BatchFile
from quire.batch.runner import run_batch
from quire.columns import unpack_i32
from quire.wire import build_request
from tests.fakes.router.fake_router import FakeRouter

Fake = tuple[FakeRouter, str]
UNUSED = "127.0.0.1:1"
# Not to be ignored: who writes it means something by it.
REFUSED = ({"prompt": "x", "multi_modal_data": {"image": "y"}}, {"prompt": "x", "cache_salt": 3})


def test_a_stream_of_deltas(fake: Fake) -> None:
    _, address = fake
    with Client(address) as client:
        deltas = list(client.generate("hi", SamplingParams(max_tokens=3), request_id="mine", return_timings=True))
    assert [delta.text for delta in deltas] == ["0 ", "1 ", "2 "]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 3
    assert [(t.service, t.phase, t.us) for t in deltas[-1].timings] == [("worker", "decode", 5)]


def test_complete_gathers_text_tokens_and_logprobs(fake: Fake) -> None:
    _, address = fake
    with Client(address) as client:
        output = client.complete("hi", SamplingParams(max_tokens=3, n=2, logprobs=1))
    assert output.prompt == "hi"
    assert output.prompt_token_ids == [7, -8]
    assert output.finished
    assert [choice.text for choice in output.outputs] == ["0 1 2 "] * 2
    assert output.outputs[1].token_ids == [0, 1, 2]
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].cumulative_logprob == -1.5
    assert output.outputs[0].logprobs is not None
    first = output.outputs[0].logprobs[0]
    assert (first[0].logprob, first[0].rank, first[0].decoded_token) == (-0.5, 1, "\ufffd")
    assert first[99].decoded_token == "b"


def test_every_parameter_travels(fake: Fake) -> None:
    router, address = fake
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        typical_p=0.75,
        seed=2**63,
        stop="s",
        stop_token_ids=[1, 2],
        ignore_eos=True,
        max_tokens=5,
        min_tokens=1,
        logprobs=0,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias={3: 1.5},
        allowed_token_ids=[4],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
    )
    with Client(address) as client:
        list(client.generate([5, 6], params, model="m", priority=-1, timeout_s=1.5))
    (request,) = router.requests
    sampling = request.sampling
    assert (request.n, request.model, request.priority, request.timeout_ms) == (2, "m", -1, 1500)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 0, 0.125)
    assert sampling.typical_p == 0.75
    assert (sampling.seed, sampling.logprobs, list(request.stop)) == (2**63, 0, ["s"])
    assert sampling.HasField("logprobs")
    assert (unpack_i32(request.token_ids.ids), unpack_i32(request.stop_token_ids)) == ([5, 6], [1, 2])
    assert (request.ignore_eos, request.max_tokens, request.min_tokens) == (True, 5, 1)
    assert (request.skip_special_tokens, request.include_stop_str_in_output) == (False, True)
    assert (dict(sampling.logit_bias), unpack_i32(sampling.allowed_token_ids)) == ({3: 1.5}, [4])
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)


def test_a_cache_salt_is_an_option_or_the_prompts_own(fake: Fake) -> None:
    router, address = fake
    with Client(address) as client:
        client.complete("hi", cache_salt="theirs")
        client.complete({"prompt": "hi", "cache_salt": "mine"})
        client.complete({"prompt_token_ids": [1, 2], "cache_salt": None})
    assert [request.cache_salt for request in router.requests] == ["theirs", "mine", ""]


def test_what_was_not_given_is_absent(fake: Fake) -> None:
    router, address = fake
    with Client(address) as client:
        list(client.generate(ChatPrompt([{"role": "user", "content": "x"}]), SamplingParams(max_tokens=None)))
        client.complete("hi", SamplingParams(max_tokens=None, temperature=0))
    request, text = router.requests
    assert not request.HasField("max_tokens") and request.fill_context and text.fill_context
    # What is drawn at random can be taken up only with its seed.
    assert request.sampling.HasField("seed") and not text.sampling.HasField("seed")
    assert not request.sampling.HasField("logprobs")
    assert request.request_id


def test_a_conversation(fake: Fake) -> None:
    router, address = fake
    with Client(address) as client:
        client.chat([{"role": "user", "content": "ü"}], SamplingParams(max_tokens=1))
        with pytest.raises(InvalidArgument, match="messages is not JSON"):
            client.chat([{"role": object()}])
        client.complete(ChatPrompt([{"role": "user"}], tools=({"a": 1},), add_generation_prompt=False))
    assert router.requests[0].chat.messages_json == '[{"role": "user", "content": "ü"}]'
    assert router.requests[1].chat.tools_json == '[{"a": 1}]'
    assert not router.requests[1].chat.add_generation_prompt


def test_a_rich_status_becomes_a_typed_error(fake: Fake) -> None:
    _, address = fake
    with Client(address) as client, pytest.raises(InvalidArgument) as raised:
        client.complete("fail", request_id="r-1")
    error = raised.value
    assert (error.code, error.fix, error.param, error.request_id) == ("PROMPT_TOO_LONG", "do better", "p", "r-1")
    assert error.message == "the message of PROMPT_TOO_LONG"


def test_advice_to_retry_is_kept(fake: Fake) -> None:
    router, address = fake
    router.overload = 1
    with Client(address) as client, pytest.raises(Overloaded) as raised:
        client.complete("hi")
    assert raised.value.retry_after_s == pytest.approx(0.01)


def test_an_error_within_a_stream_keeps_what_came_before(fake: Fake) -> None:
    _, address = fake
    seen: list[str] = []
    with Client(address) as client, pytest.raises(Unavailable) as raised:
        seen.extend(delta.text for delta in client.generate("fail later"))
    assert seen == ["0 ", "1 "]
    assert raised.value.code == "ENGINE_LOST"


def test_a_plain_status_names_the_address(fake: Fake) -> None:
    _, address = fake
    with Client(address) as client, pytest.raises(Unavailable, match=address):
        client.complete("plain")


def test_nobody_there() -> None:
    with Client(UNUSED) as client:
        for call in (client.health, client.models, lambda: client.complete("hi")):
            with pytest.raises(Unavailable) as raised:
                call()
            assert raised.value.code == "UNREACHABLE"
            assert "quire up" in raised.value.fix


def test_a_stream_that_is_left_is_cancelled(fake: Fake) -> None:
    router, address = fake
    with Client(address) as client:
        stream = client.generate("hang")
        assert next(iter(stream)).text == "x"
        stream.close()  # type: ignore[attr-defined]  # a generator, as every iterator that is written with yield
        assert router.cancelled.wait(30)


def test_the_key_is_a_bearer(fake: Fake) -> None:
    router, address = fake
    with Client(address, api_key="k") as client:
        client.complete("hi")
    with Client(address) as client:
        client.complete("hi")
    assert router.metadata[0]["authorization"] == "Bearer k"
    assert "authorization" not in router.metadata[1]


def test_health_and_models(fake: Fake) -> None:
    _, address = fake
    with Client(address) as client:
        assert client.health()
        assert [(model.name, model.vocab_size) for model in client.models()] == [("fake", 100)]


@pytest.mark.parametrize("prompt", ["", [], [1, "a"], {"text": "x"}, 3, None, [2**31], *REFUSED], ids=repr)
def test_a_prompt_that_is_none(prompt: Any) -> None:
    with Client(UNUSED) as client, pytest.raises(InvalidArgument):
        client.complete(prompt)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"prompt": "a\ud800"}, "BAD_TEXT"),
        ({"prompt": ChatPrompt([{"role": "user", "content": "\udc00"}])}, "BAD_TEXT"),
        ({"sampling_params": SamplingParams(stop="\ud800")}, "BAD_TEXT"),
        ({"cache_salt": "\ud800"}, "BAD_TEXT"),
        ({"priority": 2**31}, "BAD_PRIORITY"),
        ({"priority": 0.5}, "BAD_PRIORITY"),
    ],
    ids=ascii,
)
def test_values_that_a_message_cannot_hold_are_typed_errors(options: dict[str, Any], code: str) -> None:
    with Client(UNUSED) as client, pytest.raises(InvalidArgument, match=code):
        client.complete(**{"prompt": "a", **options})


@pytest.mark.parametrize("key", ["key\n", " key", "k\u00e9y", "a\r\nb"])
def test_api_key_that_a_header_cannot_hold_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="BAD_API_KEY"):
        Client(UNUSED, api_key=key)
    (tmp_path / "in").write_text("")
    files = BatchFile(str(tmp_path / "in"), str(tmp_path / "out"))
    with pytest.raises(InvalidArgument, match="BAD_API_KEY"):
        run_batch(files, [], "http://127.0.0.1:1", key, 1, 0)


def test_an_authority_that_cannot_be_read() -> None:
    with pytest.raises(NotFound, match="no/such"):
        Client(UNUSED, tls_ca="no/such.pem")


async def test_the_async_client_is_the_same(fake: Fake) -> None:
    router, address = fake
    async with AsyncClient(address, api_key="k") as client:
        assert await client.health()
        assert (await client.models())[0].name == "fake"
        output = await client.complete({"prompt": "hi"}, SamplingParams(max_tokens=2))
        assert output.outputs[0].text == "0 1 "
        chat = await client.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))
        assert chat.outputs[0].token_ids == [0]
        with pytest.raises(InvalidArgument):
            await client.complete("fail")
        stream = client.generate("hang")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator
    assert router.cancelled.wait(30)
    assert router.metadata[0]["authorization"] == "Bearer k"
    async with AsyncClient(UNUSED) as client:
        with pytest.raises(Unavailable):
            await client.health()
        with pytest.raises(Unavailable):
            await client.models()


async def test_searches_and_the_best_of_several_are_asked_for(fake: tuple[FakeRouter, str]) -> None:
    router, address = fake
    search = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, ignore_eos=True)
    async with AsyncClient(address) as client:
        output = await client.complete("hi", search)
        await client.complete("hi", SamplingParams(n=2, best_of=4))
    beams, several = router.requests
    assert (beams.n, beams.max_tokens, beams.ignore_eos, beams.sampling.temperature) == (3, 5, True, 0)
    assert beams.beam_search.length_penalty == 0.5 and not beams.HasField("best_of")
    assert (several.n, several.best_of) == (2, 4) and not several.HasField("beam_search")
    assert len(output.outputs) == 3 and output.finished
    with pytest.raises(InvalidArgument, match="best_of"):
        SamplingParams(n=2, best_of=1)


@pytest.mark.parametrize("timeout_s", [-1.0, 1e9, 1e300, float("inf"), float("nan")])
def test_a_time_limit_that_no_message_can_carry_is_refused_by_name(timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="BAD_TIMEOUT") as refused:
        build_request("a", SamplingParams(), request_id="r", timeout_s=timeout_s)
    assert refused.value.param == "timeout_s"
