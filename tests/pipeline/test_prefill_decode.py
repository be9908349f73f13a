"""Prefill at one replica and decode at another, real processes on the demo model: the tokens of one that does both."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import Client, SamplingParams
from quire.__main__ import main as quire_command
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from quire.outputs import RequestOutput
from tests.pipeline.leftovers import assert_nothing_left, read_state

FIRST_ID = 300
VOCAB = 4096
PAGE = 16
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A prefill and a decode replica; every prompt of some pages goes to both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("apart")))
        spec = StackSpec(
            "apart",
            str(find_model(None)),
            replicas=0,
            prefill=1,
            decode=1,
            drain_timeout_s=5.0,
            flags={"router": {"pd-least-tokens": "16", "pd-threshold-tokens": "16", "pd-by-rates": False}},
        )
        stack = LocalStack(spec)
        state = read_state("apart")
        yield stack
        assert stack.deaths == []
        stack.close()
        assert_nothing_left(state)


@pytest.fixture(scope="module")
def apart(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.grpc) as client:
        yield client


def ask(client: Client, number: int) -> RequestOutput:
    """The request of that number: prompts of all lengths around a page's, greedy or drawn, some with logprobs."""
    rng = random.Random(number)
    prompt = [rng.randrange(FIRST_ID, VOCAB) for _ in range(rng.choice([PAGE, 2 * PAGE + 1, 63, 64, 100, 200]))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        top_p=rng.choice([1.0, 0.9]),
        seed=number,
        max_tokens=rng.randint(2, 20),
        logprobs=rng.choice([None, 2]),
    )
    output = RequestOutput(prompt=None)
    for delta in client.generate(prompt, params, return_token_ids=True, return_timings=True):
        output.add(delta)
    return output


def compare(apart: Client, together: Client, numbers: range) -> None:
    handed_over = 0
    for number in numbers:
        there, here = ask(apart, number), ask(together, number)
        one, other = there.outputs[0], here.outputs[0]
        assert one.token_ids == other.token_ids and one.text == other.text, f"request {number}"
        assert (one.finish_reason, one.logprobs) == (other.finish_reason, other.logprobs), f"request {number}"
        assert there.usage is not None and here.usage is not None
        assert there.usage.completion_tokens == here.usage.completion_tokens
        handed_over += any((hop.service, hop.phase) == ("transfer", "pull") for hop in there.timings)
    assert handed_over > len(numbers) * 0.8, f"{handed_over} of {len(numbers)} requests were prefilled elsewhere"


def test_split_stack_changes_no_token(apart: Client, client: Client) -> None:
    compare(apart, client, range(12))


def test_client_can_carry_a_transfer_between_requests(stack: LocalStack) -> None:
    """As vLLM's proxies do; with the transfer used up, the third computes."""
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 6
    whole = complete(stack, prompt=text, max_tokens=12)["choices"][0]["text"]
    first = complete(stack, prompt=text, max_tokens=1, cache_salt="c", kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    assert params["remote_engine_id"] and params["remote_num_tokens"] == first["usage"]["prompt_tokens"]
    for pulls in 1, 0:
        answer = complete(stack, prompt=text, max_tokens=12, cache_salt="c", kv_transfer_params=params)
        assert answer["choices"][0]["text"] == whole and whole.startswith(first["choices"][0]["text"])
        hops = {(hop["service"], hop["phase"]): hop["count"] for hop in answer["quire_timings"]}
        assert hops.get(("transfer", "pull"), 0) == pulls * len(params["remote_block_ids"])


def test_role_change_under_load_harms_no_request(
    stack: LocalStack, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides change places and back, by what a user types."""
    monkeypatch.setenv("QUIRE_STATE_DIR", str(stack.directory.path.parent))
    text = "It is a far, far better thing that I do, than I have ever done. " * 6

    def asked() -> tuple[str, bool]:
        answer = complete(stack, prompt=text, max_tokens=12, cache_salt=str(random.getrandbits(40)))
        return answer["choices"][0]["text"], any(hop["service"] == "transfer" for hop in answer["quire_timings"])

    def role(*argv: str) -> str:
        capfd.readouterr()
        assert quire_command(["role", "--name", stack.spec.name, *argv]) == 0
        return capfd.readouterr().out

    whole, apart = asked()
    assert apart
    assert role("scheduler-prefill-1", "decode") == "scheduler-prefill-1: decode, was prefill\n"
    assert until(asked, False) == whole
    role("scheduler-decode-1", "prefill")
    assert until(asked, True) == whole
    assert re.search(r"scheduler-decode-1 +prefill +0 +0", role())
    for side in "prefill", "decode":
        role(f"scheduler-{side}-1", side)
    assert until(asked, True) == whole


def until(asked: Callable[[], tuple[str, bool]], wanted: bool) -> str:
    """The first answer that came in the wanted way: routers hear of a role within a moment."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        text, apart = asked()
        if apart == wanted:
            return text
        assert time.monotonic() < deadline, "no answer came so"


def complete(stack: LocalStack, **fields: Any) -> Any:
    state = stack.directory.read()
    assert state is not None
    headers = {"Content-Type": "application/json", "X-Quire-Timings": "1"}
    body = json.dumps({"temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{state.http}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_split_stack_changes_no_token_at_length(apart: Client, client: Client) -> None:
    compare(apart, client, range(100, 200))
