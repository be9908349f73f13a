"""Generation controls of a request reach the scheduler, over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.columns import i32, pack_i32
from quire_common.logits_processors import capabilities_of
from tests.fakes.fake_tokenizer import THINK, THOUGHT, FakeTokenizer
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

CONTROLS = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"9": 250, "7": -2.5},
    "allowed_token_ids": [7, 9, 200],
    "bad_words": ["ab", " c"],
}


def asked(rig: RouterRig) -> dict[str, Any]:
    """Of the last submit."""
    sampling = rig.scheduler.submits[-1].sequence.sampling
    return {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias),
        "allowed_token_ids": i32(sampling.allowed_token_ids).tolist(),
        "bad_words_ids": [i32(word).tolist() for word in sampling.bad_words_ids],
    }


@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_controls_reach_the_engine(route: str) -> None:
    async with router_rig() as rig:
        response = await getattr(rig, route)("xyz", max_tokens=2, n=2, **CONTROLS)
        assert response.status_code == 200, response.text
        assert asked(rig) == {
            "presence_penalty": 0.5,
            "frequency_penalty": -1.5,
            "repetition_penalty": 1.25,
            "logit_bias": {7: -2.5, 9: 100.0},  # clamped, as vLLM does
            "allowed_token_ids": [7, 9, 200],
            "bad_words_ids": [[97, 98], [99]],  # with a space before them they are longer: no other spelling of them
        }


async def test_neutral_controls_are_not_sent_to_the_engine() -> None:
    async with router_rig() as rig:
        neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []}
        await rig.complete("a", max_tokens=1, **neutral)
        sampling = rig.scheduler.submits[-1].sequence.sampling
        assert not sampling.HasField("repetition_penalty") and not sampling.logit_bias


async def test_controls_reach_the_engine_over_grpc() -> None:
    async with router_rig() as rig:
        sampling = pb.SamplingParams(
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            logit_bias={9: 100, 7: -2.5},
            allowed_token_ids=pack_i32([7, 9, 200]),
            bad_words_ids=[pack_i32([5, 6])],
        )
        request = ib.GenerateRequest(text="xyz", max_tokens=2, sampling=sampling, bad_words=["ab"])
        assert [response async for response in rig.inference.Generate(request)]
        assert asked(rig)["bad_words_ids"] == [[5, 6], [97, 98]]
        assert asked(rig)["logit_bias"] == {7: -2.5, 9: 100.0}
        assert asked(rig)["allowed_token_ids"] == [7, 9, 200]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampling": pb.SamplingParams(presence_penalty=3)}, "presence_penalty is 3.0"),
        ({"sampling": pb.SamplingParams(repetition_penalty=0)}, "repetition_penalty is 0.0"),
        ({"sampling": pb.SamplingParams(frequency_penalty=float("nan"))}, "frequency_penalty is nan"),
        ({"sampling": pb.SamplingParams(logit_bias={1: 101})}, "logit_bias of token 1 is 101.0"),
        ({"sampling": pb.SamplingParams(logit_bias={300: 1})}, "logit_bias names token id 300"),
        ({"sampling": pb.SamplingParams(bad_words_ids=[b""])}, "an empty sequence"),
        ({"sampling": pb.SamplingParams(allowed_token_ids=pack_i32([-1]))}, "allowed_token_ids names token id -1"),
        ({"bad_words": [""]}, "an empty string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_grpc_errors_name_the_bad_value(fields: dict[str, Any], says: str) -> None:
    async with router_rig() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in rig.inference.Generate(ib.GenerateRequest(text="a", **fields))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in str(caught.value.details())
        assert not rig.scheduler.submits


@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_thinking_budget_is_sent_with_the_models_marks(route: str) -> None:
    async with router_rig() as rig:
        for budget in (0, 7):
            assert (await getattr(rig, route)("a", max_tokens=1, thinking_token_budget=budget)).status_code == 200
            thinking = rig.scheduler.submits[-1].sequence.thinking
            assert (i32(thinking.start_ids).tolist(), i32(thinking.end_ids).tolist()) == ([THINK], [THOUGHT])
            assert thinking.max_tokens == budget
        for without in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": None}):
            await getattr(rig, route)("a", max_tokens=1, **without)
            assert not rig.scheduler.submits[-1].sequence.HasField("thinking")
        request = ib.GenerateRequest(text="a", max_tokens=1, thinking_token_budget=9)
        assert [response async for response in rig.inference.Generate(request)]
        assert rig.scheduler.submits[-1].sequence.thinking.max_tokens == 9


async def test_impossible_thinking_budget_is_refused() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.thinking_marks = ([], [])
    async with router_rig(tokenizers=[tokenizer]) as rig:
        for fields, code in (
            ({"thinking_token_budget": 5}, "MODEL_DOES_NOT_THINK"),
            ({"thinking_token_budget": -2}, "OUT_OF_RANGE"),
            ({"thinking_token_budget": "5"}, "BAD_TYPE"),
            ({"thinking_token_budget": 5, "use_beam_search": True}, "PARAMETER_UNSUPPORTED"),
        ):
            response = await rig.complete("a", **fields)
            assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert not rig.scheduler.submits


async def test_logits_processors_are_sent_by_name() -> None:
    scheduler = FakeScheduler(capabilities=["top_k", *capabilities_of(["shout", "whisper"])])
    async with router_rig([scheduler]) as rig:
        for names in (["shout"], ["whisper", "shout"], []):
            assert (await rig.complete("a", max_tokens=1, logits_processors=names)).status_code == 200
            assert list(rig.scheduler.submits[-1].sequence.sampling.logits_processors) == names
        sampling = pb.SamplingParams(logits_processors=["whisper"])
        request = ib.GenerateRequest(text="a", max_tokens=1, sampling=sampling)
        assert [response async for response in rig.inference.Generate(request)]
        assert list(rig.scheduler.submits[-1].sequence.sampling.logits_processors) == ["whisper"]
        sent = len(rig.scheduler.submits)
        error = (await rig.chat("a", logits_processors=["shut", "shout"])).json()["error"]
        assert (error["code"], error["param"]) == ("UNKNOWN_LOGITS_PROCESSOR", "logits_processors")
        assert "'shut'" in error["message"] and "shout, whisper" in error["message"]
        for wrong in ([{"qualname": "os.system"}], 3, ["shout"] * 17, [""]):
            assert (await rig.complete("a", logits_processors=wrong)).status_code == 400
        assert len(rig.scheduler.submits) == sent


async def test_logits_processors_are_refused_if_none_are_configured() -> None:
    async with router_rig() as rig:
        response = await rig.complete("a", logits_processors=["shout"])
        assert response.status_code == 400 and "--logits-processors" in response.json()["error"]["message"]


async def test_a_prompt_is_truncated_on_the_left() -> None:
    async with router_rig([FakeScheduler(max_model_len=20)]) as rig:
        for asked_for, fields, kept in (
            (3, {}, "hij"),
            (30, {"prompt": "hij"}, "hij"),
            (-1, {"max_tokens": 15}, "fghij"),
            (4, {"prompt": list(b"abcdefghij")}, "ghij"),
        ):
            sent = {"prompt": "abcdefghij", "max_tokens": 2, "echo": True, **fields}
            body = (await rig.complete(sent.pop("prompt"), truncate_prompt_tokens=asked_for, **sent)).json()
            assert body["choices"][0]["text"].startswith(kept) and body["usage"]["prompt_tokens"] == len(kept)
        long = await rig.chat("x" * 100, truncate_prompt_tokens=10, max_tokens=1)
        assert long.json()["usage"]["prompt_tokens"] == 10


async def test_repetition_detection_reaches_the_engine_and_the_finish_reason() -> None:
    rule = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    async with router_rig([FakeScheduler(finish=pb.FINISH_REASON_REPETITION)]) as rig:
        body = (await rig.complete("ab", max_tokens=2, repetition_detection=rule)).json()
        assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (
            "repetition",
            "repetition_detected",
        )
        sent = rig.scheduler.submits[-1].sequence.stop.repetition_detection
        assert sent == pb.RepetitionDetection(**rule)
        request = ib.GenerateRequest(text="ab", max_tokens=2, repetition_detection=sent, truncate_prompt_tokens=1)
        responses = [response async for response in rig.inference.Generate(request)]
        assert responses[-1].finish_reason == pb.FINISH_REASON_REPETITION
        assert responses[-1].stop_string == "repetition_detected", "vLLM's stop reason, as over HTTP"
        assert responses[-1].usage.prompt_tokens == 1
        assert rig.scheduler.submits[-1].sequence.stop.repetition_detection == sent
        await rig.complete("ab", max_tokens=2, repetition_detection={"max_pattern_size": 0})
        assert not rig.scheduler.submits[-1].sequence.stop.repetition_detection.min_count


async def test_a_request_has_its_own_timeout() -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        answer = await rig.complete("a", max_tokens=3, timeout_s=0.2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "REQUEST_TIMEOUT")
        rig.scheduler.gate.set()
        assert (await rig.complete("a", max_tokens=3, timeout_s=60)).status_code == 200


async def test_return_tokens_as_token_ids_names_tokens_by_id() -> None:
    async with router_rig() as rig:
        fields = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        body = (await rig.complete("ab", logprobs=1, echo=True, **fields)).json()
        told = body["choices"][0]["logprobs"]
        assert told["tokens"] == ["token_id:97", "token_id:98", "token_id:97", "token_id:98"]
        assert told["text_offset"] == [0, 1, 2, 3]
        assert told["top_logprobs"][2].keys() >= {"token_id:97"}
        assert all(name.startswith("token_id:") for top in told["top_logprobs"][1:] for name in top)
        message = (await rig.chat("ab", logprobs=True, top_logprobs=1, **fields)).json()["choices"][0]
        (first, _) = message["logprobs"]["content"]
        assert first["token"] == f"token_id:{first['bytes'][0]}"
        assert first["top_logprobs"][0]["token"].startswith("token_id:")
        body = {
            "token_ids": [97, 98],
            "sampling_params": {"max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True},
        }
        generated = (await rig.http.post("/inference/v1/generate", json=body)).json()
        assert generated["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"


async def test_chat_template_of_the_request_reaches_the_tokenizer() -> None:
    async with router_rig() as rig:
        assert (await rig.chat("a", max_tokens=1, chat_template="{{ mine }}")).status_code == 200
        conversation = ib.Chat(messages_json='[{"role": "user", "content": "a"}]', chat_template="{{ mine }}")
        assert [r async for r in rig.inference.Generate(ib.GenerateRequest(chat=conversation, max_tokens=1))]
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ mine }}"}
        assert (await rig.http.post("/tokenize", json=body)).status_code == 200
        assert [request.chat_template for request in rig.tokenizer.renders] == ["{{ mine }}"] * 3


async def test_prompt_logprobs_have_vllms_shape() -> None:
    async with router_rig() as rig:
        body = (await rig.complete("wxyz", max_tokens=2, n=2, prompt_logprobs=1)).json()
        wanted = [
            None,
            {
                "120": {"logprob": -1.0, "rank": 2, "decoded_token": "x"},
                "1": {"logprob": -0.5, "rank": 1, "decoded_token": "\x01"},
            },
            {
                "121": {"logprob": -2.0, "rank": 2, "decoded_token": "y"},
                "2": {"logprob": -0.5, "rank": 1, "decoded_token": "\x02"},
            },
            {
                "122": {"logprob": -3.0, "rank": 2, "decoded_token": "z"},
                "3": {"logprob": -0.5, "rank": 1, "decoded_token": "\x03"},
            },
        ]
        assert [choice["prompt_logprobs"] for choice in body["choices"]] == [wanted, wanted]
        first, second = (submit.sequence for submit in rig.scheduler.submits)
        assert first.sampling.prompt_logprobs == 1 and first.skip_cache_read
        assert not second.sampling.HasField("prompt_logprobs") and not second.skip_cache_read
        chat = (await rig.chat("ab", max_tokens=2, prompt_logprobs=0)).json()
        told = [entry and next(iter(entry.values()))["logprob"] for entry in chat["prompt_logprobs"][:3]]
        assert told == [None, -1, -2]
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in (await rig.complete("a", max_tokens=1)).json()["choices"][0]


async def test_grpc_answers_have_prompt_logprobs() -> None:
    async with router_rig() as rig:
        request = ib.GenerateRequest(text="wxy", max_tokens=3, n=2, sampling=pb.SamplingParams(prompt_logprobs=1))
        responses = [response async for response in rig.inference.Generate(request)]
        (told,) = [response.prompt_logprobs for response in responses if response.prompt_logprobs]
        assert [(e.token_id, e.token, e.logprob, e.rank) for e in told] == [(120, b"x", -1, 2), (121, b"y", -2, 2)]
        assert [(top.token_id, top.logprob) for e in told for top in e.top] == [(1, -0.5), (2, -0.5)]


async def test_echo_with_logprobs_returns_prompt_logprobs() -> None:
    """As harnesses use it that score texts."""
    async with router_rig() as rig:
        (choice,) = (await rig.complete(list(b"x\xc3\xa9y"), max_tokens=2, echo=True, logprobs=1)).json()["choices"]
        assert choice["text"] == "xéyx" or choice["text"].startswith("xéy")
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "y", "x", "bytes:\\xc3"]
        assert logprobs["token_logprobs"] == [None, -1, -2, -3, -1, -2]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
        assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][3] == {"\x03": -0.5, "y": -3}
        assert "prompt_logprobs" not in choice
        (choice,) = (await rig.complete("ab", max_tokens=1, echo=True, logprobs=2, prompt_logprobs=0)).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == 1 and len(choice["logprobs"]["top_logprobs"][1]) == 3


async def test_best_of_returns_the_most_likely_sequences() -> None:
    async with router_rig([FakeScheduler(tokens_per_step=2)]) as rig:
        rig.scheduler.bias = lambda submit: -float([3, 0, 2, 1][submit.sequence.sampling.sample])
        body = (await rig.complete(["ab", "cd"], max_tokens=4, n=2, best_of=4, logprobs=0)).json()
        choices = body["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["text"] for c in choices] == ["abab", "abab", "cdcd", "cdcd"]
        assert [c["logprobs"]["token_logprobs"][0] for c in choices] == [-1, -2, -1, -2]
        assert body["usage"]["completion_tokens"] == 2 * 4 * 4 and body["usage"]["prompt_tokens"] == 4
        assert [submit.sequence.sampling.sample for submit in rig.scheduler.submits] == [0, 1, 2, 3] * 2
        quiet = (await rig.complete("ab", max_tokens=4, best_of=3, echo=True, return_token_ids=True)).json()["choices"]
        assert len(quiet) == 1 and quiet[0]["logprobs"] is None and quiet[0]["text"] == "ababab"
        assert quiet[0]["prompt_token_ids"] == [97, 98]


async def test_best_of_over_grpc_returns_the_most_likely_sequences() -> None:
    async with router_rig([FakeScheduler(tokens_per_step=2)]) as rig:
        rig.scheduler.bias = lambda submit: -float([3, 0, 2, 1][submit.sequence.sampling.sample])
        for logprobs in (True, False):
            sampling = pb.SamplingParams(logprobs=0) if logprobs else pb.SamplingParams()
            request = ib.GenerateRequest(
                text="ab", max_tokens=4, n=2, best_of=4, sampling=sampling, return_token_ids=True
            )
            first, second = [response async for response in rig.inference.Generate(request)]
            assert [(each.index, each.text) for each in (first, second)] == [(0, "abab"), (1, "abab")]
            told = [[entry.logprob for entry in each.logprobs][:1] for each in (first, second)]
            assert told == ([[-1], [-2]] if logprobs else [[], []])
            assert i32(first.prompt_token_ids).tolist() == [97, 98] and second.usage.completion_tokens == 4 * 4
        for best_of, n in ((1, 2), (999, 1)):
            with pytest.raises(grpc.aio.AioRpcError, match=f"best_of is {best_of}"):
                [_ async for _ in rig.inference.Generate(ib.GenerateRequest(text="a", n=n, best_of=best_of))]
        resumed = ib.GenerateRequest(text="a", best_of=2, resume=ib.Resume(output_ids=pack_i32([97])))
        with pytest.raises(grpc.aio.AioRpcError, match="resume continues one choice"):
            [_ async for _ in rig.inference.Generate(resumed)]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"best_of": 2, "n": 3}, "OUT_OF_RANGE"),
        ({"best_of": 999}, "OUT_OF_RANGE"),
        ({"best_of": 2, "stream": True}, "STREAM_ON"),
    ],
    ids=["fewer than n", "too many", "streamed"],
)
async def test_invalid_best_of_is_refused(fields: dict[str, Any], code: str) -> None:
    async with router_rig() as rig:
        error = (await rig.complete("a", **fields)).json()["error"]
        assert (error["code"], error["param"]) == (code, "best_of")
        assert (await rig.complete("a", max_tokens=1, n=2, best_of=2, stream=True)).status_code == 200


async def test_max_tokens_zero_returns_only_the_prompt() -> None:
    async with router_rig() as rig:
        body = (await rig.complete("wxy", max_tokens=0, echo=True, logprobs=1)).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("wxy", "length")
        assert choice["logprobs"]["tokens"] == ["w", "x", "y"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 3
        bare = (await rig.complete("wxy", max_tokens=0, prompt_logprobs=0, return_token_ids=True)).json()["choices"][0]
        assert bare["text"] == "" and bare["token_ids"] == [] and len(bare["prompt_logprobs"]) == 3
        streamed = (await rig.complete("wxy", max_tokens=0, stream=True, echo=True)).text
        assert streamed.count('"text":"wxy"') == 1 and streamed.count("data: ") == 2
        assert {submit.sequence.stop.max_tokens for submit in rig.scheduler.submits} == {1}
        assert (await rig.chat("a", max_tokens=0)).status_code == 400


async def test_prompt_logprobs_are_none_if_the_engine_has_none() -> None:
    """As the paced worker is one."""
    async with router_rig() as rig:
        rig.scheduler.scores_prompts = False
        answer = await rig.complete("abc", max_tokens=2, echo=True, logprobs=1)
        assert answer.status_code == 200, answer.text
        told = answer.json()["choices"][0]["logprobs"]
        assert told["token_logprobs"][:3] == [None] * 3
        assert None not in told["token_logprobs"][3:]
