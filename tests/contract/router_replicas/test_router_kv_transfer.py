"""With `kv_transfer_params` a client prefills at one engine and decodes at another, as vLLM's proxies do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.router.pd_rig import pd_rig, sides
from tests.fakes.router.router_faults import (
    PROMPT,
    chunks_of,
    endpoints,
    host_of,
    inside,
    joined,
    nothing_left,
    text,
    until,
)
from tests.fakes.router.router_rig import RouterRig
from tests.fakes.scheduler.pd_scheduler import PdScheduler

# As vLLM's proxies write it.
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def prefilled(rig: RouterRig, **fields: Any) -> Any:
    answer = await rig.complete(PROMPT, **{"max_tokens": 1, "kv_transfer_params": ASK, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("tokens", [1, 50])
async def test_second_request_uses_the_prefill_of_the_first(tokens: int) -> None:
    front, back = fakes = sides(cached_tokens=4)
    async with pd_rig(fakes, pd_threshold_tokens=1000, kv_transfer_lease_s=7) as rig:
        document = await prefilled(rig, max_tokens=tokens)
        assert document["choices"][0]["text"] == text(1)
        assert document["choices"][0]["finish_reason"] == "length"
        assert document["usage"]["completion_tokens"] == 1
        assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        params = document["kv_transfer_params"]
        host, _, port = host_of(rig, front).address.rpartition(":")
        ((transfer_id, _),) = front.transfers.items()
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": host_of(rig, front).address,
            "remote_request_id": transfer_id.hex(),
            "remote_block_ids": [0, 1],
            "remote_num_tokens": len(PROMPT.encode()),
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": 1,
        }
        (submit,) = front.submits
        assert submit.transfer.prefill_only and submit.transfer.lease_ms == 7000
        assert not back.submits
        answer = await rig.complete(PROMPT, max_tokens=20, stream=True, kv_transfer_params=params)
        assert joined(chunks_of(answer.text)) == text(20)
        await until(lambda: nothing_left(rig) and not front.transfers)
    (submit,) = back.submits
    assert submit.transfer.ticket.transfer_id == transfer_id and not submit.sequence.output_ids
    assert front.released == [transfer_id] and len(front.submits) == 1


async def test_chat_and_generate_routes_support_kv_transfer_params() -> None:
    front, _back = fakes = sides()
    async with pd_rig(fakes, pd_threshold_tokens=1000) as rig:
        document = (await rig.chat("hello", max_completion_tokens=1, kv_transfer_params=ASK)).json()
        params = document["kv_transfer_params"]
        answer = await rig.chat("hello", max_completion_tokens=9, kv_transfer_params=params)
        assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()
        for where in "body", "extra_args":
            asked = {"kv_transfer_params": {"do_remote_decode": True}}
            sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
            body: dict[str, Any] = {"token_ids": [65, 66, 67], "sampling_params": sampling}
            if where == "body":
                body |= asked
            else:
                sampling["extra_args"] = asked
            params = (await rig.http.post("/inference/v1/generate", json=body)).json()["kv_transfer_params"]
            assert params["do_remote_prefill"] and params["remote_num_tokens"] == 3
            body = {"token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 4}, "kv_transfer_params": params}
            told = (await rig.http.post("/inference/v1/generate", json=body)).json()
            assert told["choices"][0]["token_ids"] == [65, 66, 67, 65] and told["kv_transfer_params"] is None
        await until(lambda: nothing_left(rig) and not front.transfers)


@pytest.mark.parametrize("what", ["first token ends it", "nobody comes", "no pages to give"])
async def test_kept_pages_stay_until_their_lease_ends(what: str) -> None:
    front, _back = fakes = sides()
    front.mute = what == "no pages to give"
    async with pd_rig(fakes, pd_threshold_tokens=1000) as rig:
        ends = {"stop": [PROMPT[0]]} if what == "first token ends it" else {}
        params = (await prefilled(rig, **ends))["kv_transfer_params"]
        assert (params is None) is front.mute
        await until(lambda: nothing_left(rig))
        assert len(front.transfers) == (0 if front.mute else 1)
        assert not front.released and not front.renewed


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"remote_engine_id": "gone"}, "unknown_engine"),
        ({"remote_request_id": "00ff"}, "unknown_transfer"),
        ({"remote_host": "10.0.0.1"}, "other_address"),
        ({"remote_port": 1}, "other_address"),
        ({"remote_host": None, "remote_port": None}, "used"),
    ],
)
async def test_prompt_is_computed_if_the_kept_pages_are_unavailable(change: dict[str, Any], outcome: str) -> None:
    front, back = fakes = sides()
    async with pd_rig(fakes, pd_threshold_tokens=1000) as rig:
        params = (await prefilled(rig))["kv_transfer_params"]
        before = await counted(rig, outcome)
        answer = await rig.complete(PROMPT, max_tokens=20, kv_transfer_params={**params, **change})
        assert answer.json()["choices"][0]["text"] == text(20)
        assert await counted(rig, outcome) == before + 1
        assert back.submits[0].HasField("transfer") is (outcome == "used")
        await until(lambda: nothing_left(rig))
    assert len(front.transfers) == (0 if outcome == "used" else 1)


async def counted(rig: RouterRig, outcome: str) -> float:
    name = f'quire_router_pd_client_transfers_total{{outcome="{outcome}"}} '
    lines = (await rig.http.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def test_unreachable_prefill_engine_does_not_delay_the_request() -> None:
    fakes = sides()
    async with pd_rig(fakes, pd_threshold_tokens=1000, replica_timeout_s=0.3) as rig:
        params = (await prefilled(rig))["kv_transfer_params"]
        await host_of(rig, fakes[0]).stop()
        answer = await rig.complete(PROMPT, max_tokens=20, kv_transfer_params=params)
        assert answer.json()["choices"][0]["text"] == text(20)


async def test_prompt_is_computed_if_its_prefill_engine_leaves_before_it_answers() -> None:
    front, _back = fakes = sides()
    async with pd_rig(fakes, pd_threshold_tokens=1000, replica_timeout_s=20.0) as rig:
        params = (await prefilled(rig))["kv_transfer_params"]
        front.answers_tickets.clear()
        before = await counted(rig, "no_answer")
        answer = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=20, kv_transfer_params=params))
        await until(lambda: front.tickets_asked > 0)
        rig.router.fleet.update([each for each in endpoints(rig) if each.address != host_of(rig, front).address])
        assert (await answer).json()["choices"][0]["text"] == text(20)
        assert await counted(rig, "no_answer") == before + 1
        front.answers_tickets.set()


async def test_siblings_pull_once_and_waiting_requests_renew_the_lease() -> None:
    front, back = fakes = sides()
    async with pd_rig(fakes, pd_threshold_tokens=1000, kv_transfer_lease_s=1) as rig:
        params = (await prefilled(rig))["kv_transfer_params"]
        back.pulling = False
        back.gate.clear()
        asking = asyncio.ensure_future(rig.complete(PROMPT, n=2, max_tokens=9, kv_transfer_params=params))
        await until(lambda: len(front.renewed) > 1)
        assert set(front.renewed) == front.transfers.keys()
        back.gate.set()
        assert [sequence["text"] for sequence in (await asking).json()["choices"]] == [text(9)] * 2
        await until(lambda: nothing_left(rig) and not front.transfers)
    assert [submit.HasField("transfer") for submit in back.submits] == [True, False]


async def test_prefill_is_repeated_on_another_engine_if_its_engine_is_lost() -> None:
    first, second = fakes = [PdScheduler(role="prefill"), PdScheduler(role="prefill")]
    async with pd_rig(fakes, pd_threshold_tokens=1000) as rig:
        first.gate.clear()
        second.gate.clear()
        asking = asyncio.ensure_future(prefilled(rig))
        await until(lambda: any(fake.transfers for fake in fakes))
        (lost,) = [fake for fake in fakes if fake.transfers]
        (other,) = [fake for fake in fakes if fake is not lost]
        other.gate.set()
        lost.fail_all("WORKER_LOST")
        params = (await asking)["kv_transfer_params"]
        assert params["remote_engine_id"] == host_of(rig, other).address
        assert other.submits[0].context.attempt == 1


async def test_client_disconnect_releases_the_kept_pages() -> None:
    front, _back = fakes = sides()
    front.gate.clear()
    async with pd_rig(fakes, pd_threshold_tokens=1000) as rig:
        asking = asyncio.ensure_future(prefilled(rig))
        # The ticket comes with the admission: until then nobody could release it.
        await until(lambda: bool(front.transfers) and any(sequence.admitted for sequence in inside(rig)))
        asking.cancel()
        await until(lambda: nothing_left(rig) and not front.transfers)
    assert len(front.released) == 1
