"""Control of generation over the five real processes: what is asked of the logits shows in what is written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import Client, SamplingParams
from tests.tiers import deep_after

ROOT = Path(__file__).parents[3]
PROMPT = "KING HENRY:\nOnce more unto the breach, dear friends,"
# <think> and </think> of the demo model's vocabulary.
THINKING_MARKS = (11, 12)
NOT_A_MARK = list(range(20, 4096))
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 48, "return_token_ids": True}


def choice(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def test_allowed_token_ids_limit_the_answer(http: httpx.Client) -> None:
    allowed = sorted(set(choice(http)["token_ids"]))[:5]
    drawn = choice(http, allowed_token_ids=allowed, temperature=1, ignore_eos=True)["token_ids"]
    assert len(drawn) == 48 and set(drawn) <= set(allowed)


def test_logit_bias_decides_the_token(http: httpx.Client) -> None:
    token = choice(http)["token_ids"][3]
    assert choice(http, logit_bias={str(token): 100})["token_ids"] == [token] * 48
    assert token not in choice(http, logit_bias={str(token): -100})["token_ids"]


def test_bad_words_do_not_appear(http: httpx.Client) -> None:
    words = [word for word in choice(http)["text"].split() if word.isalpha()]
    word = Counter(words).most_common(1)[0][0]
    assert word not in choice(http, bad_words=[word])["text"].split()


def test_penalties_break_repetition(http: httpx.Client) -> None:
    """The demo model's greedy text goes in circles; a token that was written is never best at the highest penalties."""
    plain, fields = choice(http, max_tokens=96)["token_ids"], {"max_tokens": 96, "presence_penalty": 2}
    varied = choice(http, **fields, frequency_penalty=2, repetition_penalty=2)["token_ids"]
    assert len(set(varied)) > 1.5 * len(set(plain))
    assert choice(http, **fields, frequency_penalty=2, repetition_penalty=2)["token_ids"] == varied


def test_request_that_forbids_every_token_is_refused(http: httpx.Client) -> None:
    ends = json.loads((ROOT / "models" / "demo" / "config.json").read_text())["eos_token_id"]
    assert choice(http, allowed_token_ids=ends)["finish_reason"] == "stop"
    answer = http.post("/v1/completions", json={**GREEDY, "allowed_token_ids": ends, "min_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "NO_TOKEN_LEFT")


def test_repetition_detection_ends_the_answer(http: httpx.Client) -> None:
    rule = {"max_pattern_size": 100, "min_count": 3}
    long = {"max_tokens": 600, "ignore_eos": True}
    ended = choice(http, **long, repetition_detection=rule)
    tokens = ended["token_ids"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("repetition", "repetition_detected")
    assert any(tokens[-3 * size :] == tokens[-size:] * 3 for size in range(1, 101)) and len(tokens) < 600
    assert choice(http, max_tokens=len(tokens), ignore_eos=True)["token_ids"] == tokens


@pytest.mark.deep
@pytest.mark.parametrize(
    "sampling",
    deep_after(
        1, [{"temperature": 1.2, "seed": 5}, {"temperature": 0}, {"top_k": 3, "seed": 1, "bad_words": ["</think>"]}]
    ),
    ids=repr,
)
@pytest.mark.parametrize("budget", [0, 1, 17])
def test_thinking_budget_ends_the_thought(
    http: httpx.Client, client: Client, sampling: dict[str, Any], budget: int
) -> None:
    """The prompt begins it, and the answer closes it where the budget says, whatever else is asked."""
    thought, prompt = THINKING_MARKS[1], f"{PROMPT}<think>"
    # top_p: over HTTP, the demo model has a default of its own.
    asked = {
        "temperature": 1,
        "top_p": 1,
        "ignore_eos": True,
        "allowed_token_ids": NOT_A_MARK,
        "max_tokens": 48,
        **sampling,
    }
    free = choice(http, prompt=prompt, **asked)["token_ids"]
    kept = choice(http, prompt=prompt, **asked, thinking_token_budget=budget)["token_ids"]
    assert thought not in free and kept.index(thought) == budget and kept[:budget] == free[:budget]
    assert kept.count(thought) == 1 and len(kept) == 48
    over_grpc = client.complete(prompt, SamplingParams(**asked, thinking_token_budget=budget))
    assert list(over_grpc.outputs[0].token_ids) == kept


def test_thinking_budget_starts_anew_with_each_thought(http: httpx.Client) -> None:
    """Of a model that thinks of nothing but thinking."""
    think, thought = THINKING_MARKS
    restless = choice(http, logit_bias={str(think): 100}, thinking_token_budget=3, ignore_eos=True)["token_ids"]
    assert restless == ([think] * 4 + [thought]) * 9 + [think] * 3


def test_thinking_budget_is_per_choice(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": f"{PROMPT}<think>", "temperature": 1, "seed": 3, "n": 3, "thinking_token_budget": 6}
    choices = http.post("/v1/completions", json={**body, "allowed_token_ids": NOT_A_MARK}).json()["choices"]
    assert [each["token_ids"].index(THINKING_MARKS[1]) for each in choices] == [6, 6, 6]
    assert len({tuple(each["token_ids"][:6]) for each in choices}) == 3


def test_prompt_logprobs_equal_those_of_the_same_text_as_output(http: httpx.Client) -> None:
    """Of a prompt long enough to come in chunks, though its pages are in a cache by then."""
    prompt = choice(http, prompt=PROMPT * 20, max_tokens=1)["prompt_token_ids"]
    written = choice(http, prompt=prompt, max_tokens=24, ignore_eos=True, logprobs=2)
    both = [*prompt, *written["token_ids"]]
    read = choice(http, prompt=both, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"]
    assert len(read) == len(both) and read[0] is None
    assert [next(iter(entry)) for entry in read[1:]] == [str(token) for token in both[1:]]
    found = [next(iter(entry.values()))["logprob"] for entry in read[len(prompt) :]]
    assert found == written["logprobs"]["token_logprobs"]
    assert [next(iter(entry.values()))["rank"] for entry in read[len(prompt) :]] == [1] * 24
    assert all(2 <= len(entry) <= 3 for entry in read[1:])
