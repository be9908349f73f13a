"""The public gRPC contract over the five real processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest

from quire import ChatPrompt, Client, InvalidArgument, NotFound, RequestOutput, SamplingParams
from quire.local.stack import LocalStack

PROMPT = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
# A stream so long that not all of it waits while one of the services has no processor.
LONG = GREEDY.clone(max_tokens=160)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def test_grpc_reports_health_and_models(client: Client) -> None:
    assert client.health()
    (model,) = client.models()
    assert model.name
    assert model.architecture == "LlamaForCausalLM"
    assert model.vocab_size == 4096
    assert model.max_model_len > 0


def test_grpc_stream_equals_the_whole_answer(client: Client) -> None:
    deltas = list(client.generate(PROMPT, LONG, return_token_ids=True, return_timings=True))
    whole = client.complete(PROMPT, LONG)
    assert "".join(delta.text for delta in deltas) == text_of(whole)
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert len(deltas) > 2
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert len(whole.outputs[0].token_ids) == LONG.max_tokens
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert whole.usage.completion_tokens == LONG.max_tokens


def test_timings_name_the_services(client: Client) -> None:
    """But for the kvstore, which is not asked where the router knows that it has nothing: see test_kept_pages."""
    output = client.complete("A prompt of its own: " + PROMPT, GREEDY, return_timings=True)
    hops = {(timing.service, timing.phase) for timing in output.timings}
    assert {service for service, _ in hops} - {"kvstore"} == {"router", "tokenizer", "scheduler", "worker"}
    assert len(hops) == len(output.timings)


def test_token_id_prompt_equals_text_prompt(client: Client) -> None:
    by_text = client.complete(PROMPT, GREEDY)
    by_ids = client.complete(by_text.prompt_token_ids, GREEDY)
    assert text_of(by_ids) == text_of(by_text)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_seeded_answer_does_not_depend_on_the_batch(client: Client) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    alone = client.complete(PROMPT, params)
    with ThreadPoolExecutor(12) as pool:
        company = list(pool.map(lambda i: client.complete(PROMPT, params.clone(seed=7 + i % 3)), range(12)))
    assert all(text_of(output) == text_of(alone) for output in company[::3])
    assert len({text_of(output) for output in company}) == 3


def test_cached_prefix_changes_no_answer(client: Client) -> None:
    prompt = "MENENIUS:\n" + PROMPT * 3
    cold = client.complete(prompt, GREEDY)
    warm = client.complete(prompt, GREEDY)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert cold.num_cached_tokens == 0


def test_siblings_differ_and_the_first_equals_a_single_request(client: Client) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, n=3)
    output = client.complete(PROMPT, params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) == 3
    assert output.outputs[0].text == text_of(client.complete(PROMPT, params.clone(n=1)))
    assert output.usage is not None
    assert output.usage.completion_tokens == 48


def test_stop_strings_and_stop_tokens_end_the_answer(client: Client) -> None:
    free = client.complete(PROMPT, GREEDY)
    text, ids = text_of(free), free.outputs[0].token_ids
    stop = text[len(text) // 2 :][:3]
    cut = client.complete(PROMPT, GREEDY.clone(stop=stop))
    assert text_of(cut) == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    kept = client.complete(PROMPT, GREEDY.clone(stop=[stop], include_stop_str_in_output=True))
    assert text_of(kept) == text[: text.index(stop) + len(stop)]
    by_token = client.complete(PROMPT, GREEDY.clone(stop_token_ids=[ids[5]]))
    assert by_token.outputs[0].token_ids == ids[: ids.index(ids[5]) + 1]
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", ids[5])


def test_grpc_logprobs_match_the_tokens(client: Client) -> None:
    output = client.complete(PROMPT, GREEDY.clone(logprobs=3))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 24
    for token, candidates in zip(output.outputs[0].token_ids, logprobs, strict=True):
        assert len(candidates) == 3
        assert candidates[token].rank == 1
        assert candidates[token].logprob == max(candidate.logprob for candidate in candidates.values())
    cumulative = sum(candidates[t].logprob for t, candidates in zip(output.outputs[0].token_ids, logprobs, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(cumulative)


def test_chat_uses_the_models_template(client: Client) -> None:
    messages = [{"role": "user", "content": "Speak of love."}]
    output = client.chat(messages, GREEDY)
    longer = client.complete(ChatPrompt([*messages, {"role": "assistant", "content": "Love is"}]), GREEDY)
    assert output.outputs[0].token_ids
    assert len(longer.prompt_token_ids) > len(output.prompt_token_ids) > 5


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "param"),
    [
        (list(range(100)) * 100, {}, "PROMPT_TOO_LONG", "prompt"),
        ("x", {"max_tokens": 10**9}, "MAX_TOKENS_TOO_LARGE", "max_tokens"),
        ([5000], {}, "TOKEN_OUT_OF_RANGE", "prompt"),
        ("x", {"n": 10**6}, "OUT_OF_RANGE", "n"),
        ("x", {"stop": ["s"] * 100_000}, "TOO_MANY_ITEMS", "stop"),
    ],
    ids=lambda value: None if isinstance(value, list | dict) else str(value),
)
def test_bad_input_is_a_typed_error_and_harms_no_other_request(
    client: Client, prompt: str | list[int], fields: dict[str, int], code: str, param: str
) -> None:
    other: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: other.append(client.complete(PROMPT, GREEDY)))
    thread.start()
    with pytest.raises(InvalidArgument) as raised:
        client.complete(prompt, SamplingParams(**fields), request_id="bad-one")  # type: ignore[arg-type]  # by name
    thread.join()
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.fix
    assert other[0].finished


def test_unknown_model_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound) as raised:
        client.complete("x", model="no-such-model")
    assert raised.value.param == "model"


def test_two_clients_are_served_at_once(stack: LocalStack) -> None:
    with Client(stack.grpc) as one, Client(stack.grpc) as two:
        first, second = one.generate(PROMPT, GREEDY), two.generate(PROMPT, GREEDY)
        texts = ["", ""]
        for pair in zip_longest(first, second):
            texts = [text + (delta.text if delta else "") for text, delta in zip(texts, pair, strict=True)]
        assert texts[0] == texts[1] != ""
