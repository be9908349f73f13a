"""A request is prefilled at one engine and decoded at another: its tokens, and the messages to both engines."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quire_common.columns import i32
from tests.fakes.router.pd_rig import all_free, pd_rig, refusal, sides
from tests.fakes.router.router_faults import PROMPT, WAIT_S, chunks_of, host_of, joined, text, until
from tests.fakes.router.router_rig import RouterRig
from tests.fakes.scheduler.pd_scheduler import PdScheduler


@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_comes_from_the_prefill_side_and_the_rest_from_the_decode_side(stream: bool) -> None:
    front, back = fakes = sides(cached_tokens=5)
    back.cached_tokens = 99
    async with pd_rig(fakes) as rig:
        rig.http.headers["x-quire-timings"] = "1"
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await rig.complete(PROMPT, max_tokens=40, temperature=0.5, logprobs=1, stream=stream, **usage)
        if stream:
            *chunks, last = chunks_of(answer.text)
            assert joined(chunks) == text(40)
            logprobs = [value for c in chunks for value in c["choices"][0]["logprobs"]["token_logprobs"]]
        else:
            last = answer.json()
            assert last["choices"][0]["text"] == text(40)
            logprobs = last["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs == [-1.0 - i for i in range(40)]
        assert last["usage"]["completion_tokens"] == 40
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
        await until(lambda: all_free(rig, fakes))
    (prefill,), (reservation,) = front.submits, back.submits
    assert prefill.transfer.prefill_only and reservation.transfer.await_handover
    assert prefill.sequence == reservation.sequence
    assert (prefill.context.attempt, reservation.context.attempt) == (0, 1)
    assert prefill.context.request_id == reservation.context.request_id
    ticket, token = back.told
    assert ticket.handle == token.handle == reservation.handle != prefill.handle
    assert ticket.ticket.transfer_id == front.released[0] and len(front.released) == 1
    assert i32(token.token).tolist() == list(PROMPT.encode()[:1]) and not token.give_up
    assert not front.aborts and not back.aborts
    timings = {(t["service"], t["phase"]): t for t in last["quire_timings"]}
    assert timings["prefill worker", "prefill"]["us"] == 77
    instances = [host_of(rig, side).address for side in (front, back)]
    assert [timings[hop]["instance"] for hop in (("prefill worker", "prefill"), ("transfer", "pull"))] == instances
    assert timings["transfer", "pull"]["us"] == 1234 and ("router", "handoff") in timings
    assert ("router", "migrate") not in timings


async def test_first_token_is_sent_before_the_decode_side_runs() -> None:
    front, back = fakes = sides()
    back.gate.clear()
    async with pd_rig(fakes) as rig:
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 30, "temperature": 0}
        async with rig.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            async with asyncio.timeout(WAIT_S):
                first = await anext(lines)
            assert chunks_of(first)[0]["choices"][0]["text"] == text(1)
            assert not front.running
            back.gate.set()
            rest = first + "\n" + "\n".join([line async for line in lines])
        assert joined(chunks_of(rest)) == text(30)
        await until(lambda: all_free(rig, fakes))


async def test_reservation_ends_if_the_first_token_is_the_last() -> None:
    front, back = fakes = sides()
    back.pulling = False
    async with pd_rig(fakes) as rig:
        document = (await rig.complete("abc", max_tokens=30, stop_token_ids=[ord("a")])).json()
        assert document["choices"][0]["finish_reason"] == "stop"
        await until(lambda: all_free(rig, fakes))
        stopped = (await rig.complete("abc", max_tokens=30, stop=["a"])).json()["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == ("", "a")
        await until(lambda: all_free(rig, fakes))
    assert len(front.prefills) == len(back.reservations) == len(front.released) == 2
    assert back.aborts[0] == back.reservations[0].handle


async def break_front(rig: RouterRig, front: PdScheduler) -> None:
    front.break_sessions()


async def stop_front(rig: RouterRig, front: PdScheduler) -> None:
    await host_of(rig, front).stop()


async def fail_front(rig: RouterRig, front: PdScheduler) -> None:
    front.fail_all("WORKER_LOST")


async def drain_front(rig: RouterRig, front: PdScheduler) -> None:
    front.fail_all("DRAINING")


@pytest.mark.parametrize("fault", [break_front, stop_front, fail_front, drain_front], ids=lambda f: f.__name__)
async def test_decode_side_computes_the_prompt_if_the_prefill_side_is_lost(fault: Any) -> None:
    front, back = fakes = sides()
    front.gate.clear()
    async with pd_rig(fakes) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: bool(front.running and back.told))
        await fault(rig, front)
        assert (await asking).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    assert back.told[-1].give_up and not back.told[-1].token
    assert len(back.submits) == 1


async def test_decode_side_computes_the_prompt_if_the_prefill_side_is_full() -> None:
    front, back = fakes = sides()
    async with pd_rig(fakes) as rig:
        front.refuse = refusal("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await rig.complete(PROMPT, max_tokens=30)).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    assert [handover.give_up for handover in back.told] == [True]


async def test_prefill_side_without_a_ticket_hands_over_only_the_token() -> None:
    front, back = fakes = sides()
    front.mute = True
    async with pd_rig(fakes) as rig:
        assert (await rig.complete(PROMPT, max_tokens=30)).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    (handover,) = back.told
    assert handover.give_up and len(handover.token) == 4


async def break_back(rig: RouterRig, back: PdScheduler) -> None:
    back.break_sessions()


async def fail_back(rig: RouterRig, back: PdScheduler) -> None:
    back.fail_kept("WORKER_LOST")


async def fill_back(rig: RouterRig, back: PdScheduler) -> None:
    back.fail_kept("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("fault", [break_back, fail_back, fill_back], ids=lambda f: f.__name__)
async def test_ticket_goes_to_another_decode_side_if_the_first_is_lost_before_the_token(fault: Any) -> None:
    front, *backs = fakes = sides(2)
    front.gate.clear()
    async with pd_rig(fakes) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: bool(front.running and any(back.told for back in backs)))
        (kept,) = [back for back in backs if back.kept]
        (other,) = [back for back in backs if back is not kept]
        kept.pulled.clear()
        await fault(rig, kept)
        await until(lambda: not any(r.session.reservations for r in rig.router.fleet.replicas.values()))
        front.gate.set()
        assert (await asking).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    (submit,) = other.submits
    assert i32(submit.sequence.output_ids).tolist() == list(PROMPT.encode()[:1])
    assert submit.context.attempt == 2 and not submit.transfer.await_handover


@pytest.mark.parametrize("pulling", [False, True])
async def test_another_decode_side_continues_if_the_first_is_lost_after_the_handover(pulling: bool) -> None:
    """With the ticket, where its pages have not been pulled yet; by computing all, where they were let go."""
    front, *backs = fakes = sides(2)
    for back in backs:
        back.pulling = pulling
        back.gate.clear()
    async with pd_rig(fakes) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: any(back.running for back in backs) and bool(front.released) is pulling)
        (first,) = [back for back in backs if back.running]
        (other,) = [back for back in backs if back is not first]
        other.gate.set()
        other.pulling = True
        first.break_sessions()
        assert (await asking).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    (submit,) = other.submits
    assert submit.transfer.HasField("ticket") is not pulling
    assert submit.context.attempt == 2
    assert len(front.released) == 1


@pytest.mark.parametrize("state", ["prefilling", "handed over", "decoding"])
async def test_client_disconnect_ends_both_sides(state: str) -> None:
    front, back = fakes = sides()
    back.pulling = False
    (front if state == "prefilling" else back).gate.clear()
    async with pd_rig(fakes) as rig:
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 2000}
        asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
        await until(lambda: len(back.told) == (1 if state == "prefilling" else 2))
        if state == "decoding":
            back.gate.set()
            await until(lambda: any(run.sent > 5 for run in back.running.values()))
        asking.cancel()
        await until(lambda: all_free(rig, fakes))
    assert len(front.released) == 1
    assert back.aborts == [back.reservations[0].handle]
    assert front.aborts == ([front.prefills[0].handle] if state == "prefilling" else [])


async def test_pages_pulled_before_the_first_token_are_kept() -> None:
    front, back = fakes = sides()
    front.gate.clear()
    async with pd_rig(fakes) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: bool(front.released))
        front.gate.set()
        assert (await asking).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    assert [handover.give_up for handover in back.told] == [False, False] and len(front.released) == 1


async def test_restarted_prefill_keeps_its_ticket() -> None:
    front, back = fakes = sides()
    front.gate.clear()
    back.pulling = False
    async with pd_rig(fakes) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: bool(back.told))
        front.admit_again()
        front.gate.set()
        assert (await asking).json()["choices"][0]["text"] == text(30)
        await until(lambda: all_free(rig, fakes))
    assert len(back.told) == 2 and len(front.released) == 1


async def test_leases_of_waiting_transfers_are_renewed() -> None:
    front, back = fakes = sides(lease_ms=300)
    back.pulling = False
    back.gate.clear()
    async with pd_rig(fakes) as rig:
        asking = [asyncio.ensure_future(rig.complete(PROMPT, max_tokens=5)) for _ in range(3)]
        await until(lambda: len(front.transfers) == 3 and len(front.renewed) >= 6)
        assert set(front.renewed) == front.transfers.keys()
        back.gate.set()
        for answer in await asyncio.gather(*asking):
            assert answer.json()["choices"][0]["text"] == text(5)
        await until(lambda: all_free(rig, fakes))
        renewed = len(front.renewed)
        await asyncio.sleep(0.3)
        assert len(front.renewed) == renewed


async def test_failed_pull_is_counted_and_the_request_succeeds() -> None:
    front, back = fakes = sides()
    back.wrong = refusal("TRANSFER_GONE", grpc.StatusCode.NOT_FOUND)
    async with pd_rig(fakes) as rig:
        assert (await rig.complete(PROMPT, max_tokens=5)).json()["choices"][0]["text"] == text(5)
        metrics = (await rig.http.get("/metrics")).text
        assert 'quire_router_pd_pull_failures_total{code="TRANSFER_GONE"}' in metrics
        assert 'quire_router_pd_handoffs_total{outcome="reserved"}' in metrics
        await until(lambda: all_free(rig, fakes))
    assert len(front.released) == 1


async def test_roles_decide_which_side_runs_a_request() -> None:
    """Siblings, and what is asked of a prompt, stay together; a prefill replica runs them where nobody else is left."""
    front, back = fakes = sides()
    async with pd_rig(fakes) as rig:
        for fields in {"n": 2}, {"prompt_logprobs": 1}, {"max_tokens": 1}:
            assert (await rig.complete("abc", **{"max_tokens": 4, **fields})).status_code == 200
        assert len(back.submits) == 4 and not front.submits
        back.role = "prefill"
        back.report()
        await until(lambda: rig.router.fleet.replicas[host_of(rig, back).address].role == "prefill")
        assert (await rig.complete("abc", max_tokens=4)).json()["choices"][0]["text"] == "abca"
        assert not any(submit.HasField("transfer") for fake in fakes for submit in fake.submits)
        back.set_phase("draining")
        await until(lambda: not rig.router.fleet.replicas[host_of(rig, back).address].accepts)
        assert (await rig.complete("abc", max_tokens=4)).json()["choices"][0]["text"] == "abca"
        assert front.submits
