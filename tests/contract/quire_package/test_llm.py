from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, AsyncClient, BeamSearchParams, InvalidArgument, NotFound, SamplingParams, Unavailable
from quire.local.events import Died
from quire.outputs import ModelCard
from quire.prompts import Prompt
from quire.v1 import common_pb2
from tests.fakes.router.fake_router import FakeRouter

Fake = tuple[FakeRouter, str]


def test_outputs_are_in_the_prompts_order(fake: Fake) -> None:
    _, address = fake
    params = [SamplingParams(max_tokens=n) for n in (3, 1, 2)]
    with LLM(address=address) as llm:
        outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2]


def test_the_models_own_defaults_count_where_a_call_gives_no_params(fake: Fake) -> None:
    router, address = fake
    router.sampling_defaults.MergeFrom(common_pb2.SamplingDefaults(temperature=0.0, top_k=7, max_tokens=3))
    with LLM(address=address) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=7, max_tokens=3)
        llm.generate("a")
        llm.chat([{"role": "user", "content": "x"}])
        llm.generate("a", SamplingParams())
    seen = [(r.sampling.temperature, r.sampling.top_k, r.max_tokens) for r in router.requests]
    assert seen == [(0.0, 7, 3), (0.0, 7, 3), (1.0, 0, 16)]


@pytest.mark.parametrize("options", [{"bad_option": 1}, {"replicas": 0}])
def test_options_are_refused_before_a_model_is_looked_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.llm.find_model", lambda *_: pytest.fail("a model was looked for"))
    with pytest.raises(InvalidArgument):
        LLM("org/x", **options)


def test_prompts_are_served_together(fake: Fake) -> None:
    router, address = fake
    router.together = threading.Barrier(8)  # breaks unless eight requests are there at once
    with LLM(address=address) as llm:
        outputs = llm.generate([f"p{i}" for i in range(8)])
    assert all(output.finished for output in outputs)


def test_prompts_in_every_form(fake: Fake) -> None:
    router, address = fake
    mappings: list[Prompt] = [{"prompt": "a"}, {"prompt_token_ids": [4]}]
    with LLM(address=address) as llm:
        assert len(llm.generate("text")) == 1
        assert len(llm.generate([1, 2, 3])) == 1
        assert len(llm.generate([[1], [2, 3]])) == 2
        assert len(llm.generate(mappings)) == 2
        assert llm.generate([]) == []
        assert len(llm.chat([{"role": "user", "content": "x"}])) == 1
        assert len(llm.chat([[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]])) == 2
        assert len(llm.chat([{"role": "user", "content": "x"}], chat_template="{{ messages }}")) == 1
    assert [bool(r.token_ids.ids) for r in router.requests[:4]] == [False, True, True, True]
    assert [r.chat.chat_template for r in router.requests[-2:]] == ["", "{{ messages }}"]


def test_a_full_queue_is_waited_for(fake: Fake) -> None:
    router, address = fake
    router.overload = 5
    with LLM(address=address) as llm:
        outputs = llm.generate(["a", "b", "c"])
    assert all(output.finished for output in outputs)
    assert len(router.requests) == 8


def test_prompt_beyond_grpcs_limit_is_an_error_and_not_sent_again_and_again(fake: Fake) -> None:
    router, address = fake
    with LLM(address=address) as llm, pytest.raises(InvalidArgument, match="MESSAGE_TOO_LARGE"):
        llm.generate("a" * (5 << 20))  # the fake has gRPC's own limit of 4 MiB
    assert not router.requests


def test_a_failure_is_the_requests_own_error(fake: Fake) -> None:
    _, address = fake
    with LLM(address=address) as llm:
        with pytest.raises(InvalidArgument, match="PROMPT_TOO_LONG"):
            llm.generate(["a", "fail", "b"])
        assert llm.generate("a")[0].finished


def test_lengths_must_agree(fake: Fake) -> None:
    _, address = fake
    with LLM(address=address) as llm, pytest.raises(InvalidArgument, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)


async def test_works_within_a_running_loop(fake: Fake) -> None:
    _, address = fake
    assert asyncio.get_running_loop().is_running()
    with LLM(address=address) as llm:
        assert llm.generate("a")[0].finished


def test_beam_search_without_an_answer_about_models_closes_its_bar(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_client: AsyncClient) -> list[ModelCard]:
        raise Unavailable("ENGINE_LOST", "The router is away.", "Try again.")

    class Bar:
        closed = False

        def __init__(self, **_options: Any) -> None:
            bars.append(self)

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    monkeypatch.setattr(AsyncClient, "models", models)
    with LLM(address=fake[1]) as llm, pytest.raises(Unavailable, match="router is away"):
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=Bar)
    assert [bar.closed for bar in bars] == [True]


@pytest.mark.parametrize("died", [True, False])
@pytest.mark.parametrize("listed", [None, []], ids=["unavailable", "empty"])
@pytest.mark.parametrize(
    "ask",
    [lambda llm: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2)), lambda llm: llm.generate("a")],
    ids=["beams", "defaults"],
)
def test_dead_service_explains_why_no_model_was_listed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, ask: Callable[[LLM], Any], listed: list[ModelCard] | None, died: bool
) -> None:
    async def models(_client: AsyncClient) -> list[ModelCard]:
        if listed is None:
            raise Unavailable("ROUTER_LOST", "The router is away.", "Try again.")
        return listed

    monkeypatch.setattr(AsyncClient, "models", models)
    stack: Any = SimpleNamespace(deaths=[Died("router", "OUT_OF_MEMORY", "no memory", "Free some.", "x.log")])
    with LLM(address=fake[1]) as llm:
        llm._stack = stack if died else None
        with pytest.raises(Unavailable) as raised:
            ask(llm)
    assert raised.value.code == ("OUT_OF_MEMORY" if died else "ROUTER_LOST" if listed is None else "NO_HEALTHY_REPLICA")


def test_close_is_idempotent_and_leaves_no_thread(fake: Fake) -> None:
    _, address = fake
    llm = LLM(address=address)
    llm.close()
    llm.close()
    assert "quire-llm" not in {thread.name for thread in threading.enumerate()}


def test_a_model_and_an_address_are_one_too_many() -> None:
    with pytest.raises(InvalidArgument, match="MODEL_AND_ADDRESS"):
        LLM("model", address="127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="MODEL_AND_ADDRESS"):
        LLM(address="127.0.0.1:1", max_num_seqs=3)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(NotFound, match="/no/such/model"):
        LLM("/no/such/model")


def test_an_option_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="max_num_seqs"):
        LLM(max_num_seq=3)
