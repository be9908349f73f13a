"""A model's sampling defaults apply to parameters that a request over HTTP leaves out, and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.credit import SamplingDefaults
from quire_common.credit.hello import model_from_pb, model_to_pb
from quire_common.request_parameters import MODEL_DEFAULTS
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

DEFAULTS = {
    "temperature": 0.0,
    "top_k": 20,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "max_tokens": 5,
}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


async def asked(rig: RouterRig, path: str, **body: Any) -> dict[str, float]:
    """The sampling that the scheduler was asked for by a request to a path."""
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return submitted(rig)


def submitted(rig: RouterRig) -> dict[str, float]:
    sequence = rig.scheduler.submits[-1].sequence
    found = {name: getattr(sequence.sampling, name) for name in PLAIN}
    for name in ("top_p", "repetition_penalty"):
        if not sequence.sampling.HasField(name):
            found[name] = 1.0
    return {**found, "max_tokens": sequence.stop.max_tokens}


async def test_absent_parameters_get_the_models_defaults() -> None:
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS, max_model_len=64)]) as rig:
        assert await asked(rig, "/v1/chat/completions", **CHAT) == DEFAULTS
        # A completion has a length of its own, by OpenAI's API.
        assert await asked(rig, "/v1/completions", prompt="a") == {**DEFAULTS, "max_tokens": 16}
        assert await asked(rig, "/v1/responses", input="a") == DEFAULTS
        assert await asked(rig, "/v1/messages", **CHAT, max_tokens=9) == {**DEFAULTS, "max_tokens": 9}
        assert await asked(rig, "/invocations", **CHAT, model="fake") == DEFAULTS
        refused = await rig.http.post("/v1/messages", json=CHAT)
        assert refused.json()["error"]["message"].startswith("max_tokens is missing"), "Anthropic's API wants it"


async def test_null_gets_the_default_and_a_value_overrides_it() -> None:
    own = {"temperature": 0.75, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3}
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS)]) as rig:
        nothing = dict.fromkeys((*DEFAULTS, "max_completion_tokens"))
        assert await asked(rig, "/v1/chat/completions", **CHAT, **nothing) == DEFAULTS
        assert await asked(rig, "/v1/chat/completions", **CHAT, **own) == own
        longest = await asked(rig, "/v1/chat/completions", **CHAT, max_completion_tokens=7)
        assert longest == {**DEFAULTS, "max_tokens": 7}


async def test_response_object_shows_the_defaults_used() -> None:
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS)]) as rig:
        answer = (await rig.http.post("/v1/responses", json={"input": "a"})).json()
        assert (answer["temperature"], answer["top_p"]) == (0.0, 0.5)


async def test_rendered_request_contains_the_models_defaults() -> None:
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS)]) as rig:
        rendered = (await rig.http.post("/v1/chat/completions/render", json=CHAT)).json()
        assert {name: rendered["sampling_params"][name] for name in DEFAULTS} == DEFAULTS
        # Whoever sends token ids and sampling params means these as they are, as in vLLM.
        body = {"token_ids": [97], "sampling_params": {}}
        assert await asked(rig, "/inference/v1/generate", **body) == {**PLAIN, "max_tokens": 16}


async def test_grpc_requests_do_not_get_the_models_defaults() -> None:
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS)]) as rig:
        request = ib.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=1.0))
        async for _ in rig.inference.Generate(request):
            pass
        assert submitted(rig) == {**PLAIN, "max_tokens": 16}


async def test_beam_search_uses_only_the_default_temperature() -> None:
    """As in vLLM; penalties would be refused."""
    async with router_rig([FakeScheduler(sampling_defaults=DEFAULTS)]) as rig:
        body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}
        answer = await rig.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = submitted(rig)
        assert {name: found[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty")} == {
            name: PLAIN[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty")
        }


async def test_each_model_has_its_own_defaults() -> None:
    schedulers = [
        FakeScheduler(model="one", digest=b"1", sampling_defaults={"top_k": 1}),
        FakeScheduler(model="two", digest=b"2"),
    ]
    async with router_rig(schedulers) as rig:
        for name, top_k in (("one", 1), ("two", 0)):
            rendered = await rig.http.post("/v1/completions/render", json={"prompt": "a", "model": name})
            assert rendered.json()[0]["sampling_params"].get("top_k", 0) == top_k
        unknown = await rig.http.post("/v1/completions", json={"prompt": "a", "model": "three"})
        assert unknown.json()["error"]["code"] == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("defaults", [(), (("temperature", 0.0), ("top_p", 0.6)), tuple(DEFAULTS.items())])
def test_contract_distinguishes_zero_from_absent(defaults: SamplingDefaults) -> None:
    fields: Any = dict(defaults)
    message = pb.ModelInfo(name="m", sampling_defaults=pb.SamplingDefaults(**fields))
    model = model_from_pb(message)
    assert model.sampling_defaults == defaults
    assert model_from_pb(model_to_pb(model)).sampling_defaults == defaults


def test_contract_has_a_field_for_each_default_parameter() -> None:
    assert {each.name for each in MODEL_DEFAULTS} == set(pb.SamplingDefaults.DESCRIPTOR.fields_by_name)
