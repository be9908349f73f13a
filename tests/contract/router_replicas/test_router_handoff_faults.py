"""However often either engine of a request fails, the client gets the bytes of an undisturbed run."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.pd_rig import all_free, pd_rig
from tests.fakes.router.router_faults import PROMPT, chunks_of, joined, text, until
from tests.fakes.router.router_rig import RouterRig
from tests.fakes.scheduler.pd_scheduler import PdScheduler


@given(st.data())
# Without shrinking: each example is a whole router, and the first that fails says enough.
@settings(max_examples=20, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_failures_of_either_side_do_not_change_the_clients_bytes(data: st.DataObject) -> None:
    breaks = [
        data.draw(st.lists(st.integers(1, 40), max_size=4), label=f"tokens between two breaks of {name}")
        for name in ("a prefill side", "the other", "a decode side", "the other")
    ]
    pulling = data.draw(st.booleans(), label="pulls end")
    steps = data.draw(st.integers(1, 4), label="tokens per step")
    streams = data.draw(st.integers(1, 4), label="requests at once")
    stop = data.draw(st.sampled_from([None, "ee", "o\u00e9", "\U0001f600 th"]), label="stop")
    deaths = data.draw(st.lists(st.integers(1, 30), max_size=2), label="steps between two tokenizers' deaths")
    asyncio.run(same_bytes(breaks, pulling, steps, streams, stop, deaths))


async def same_bytes(
    breaks: list[list[int]], pulling: bool, tokens_per_step: int, streams: int, stop: str | None, deaths: list[int]
) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "logprobs": 1, "return_token_ids": True, "seed": 7}
    if stop is not None:
        fields["stop"] = [stop]

    async def ask(rig: RouterRig) -> list[Any]:
        requests = [rig.complete(PROMPT, **fields, stream=bool(i % 2)) for i in range(2 * streams)]
        return [told(response) for response in await asyncio.gather(*requests)]

    # A prefill side draws one token, whatever a step of it would say.
    fronts = [PdScheduler(role="prefill", step_s=0.001) for _ in range(2)]
    backs = [PdScheduler(role="decode", step_s=0.001, tokens_per_step=tokens_per_step) for _ in range(2)]
    fakes = [*fronts, *backs]
    for fake in fakes:
        fake.pulling = pulling
    async with pd_rig(fakes, tokenizers=[FakeTokenizer(), FakeTokenizer()], migration_limit=20) as rig:
        undisturbed = await ask(rig)
        assert any(fake.prefills for fake in fronts)
        for fake, counts in zip(fakes, breaks, strict=True):
            fake.breaks = list(counts)
        # One tokenizer a round: a request that loses two in a row is failed (test_router_poison.py).
        for round_, steps in enumerate(deaths or (None,)):
            for number, tokenizer in enumerate(rig.tokenizers):
                tokenizer.break_after = steps if number == round_ else None
            assert await ask(rig) == undisturbed
        await until(lambda: all_free(rig, fakes))


def told(response: Any) -> Any:
    """What was told of the one choice, however it was cut."""
    assert response.status_code == 200, response.text
    found: dict[str, Any] = {"text": "", "ids": [], "logprobs": []}
    for document in chunks_of(response.text) if response.text.startswith("data: ") else [response.json()]:
        assert "error" not in document
        for choice in document["choices"]:
            found["text"] += choice["text"]
            found["ids"] += choice["token_ids"]
            found["logprobs"] += choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"]:
                found["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


async def test_late_messages_of_an_abandoned_prefill_side_are_ignored() -> None:
    options: dict[str, Any] = {"heartbeat_ms": 100, "step_s": 0.002}
    front, back = fakes = [PdScheduler(role="prefill", **options), PdScheduler(role="decode", **options)]
    front.gate.clear()
    back.gate.clear()
    async with pd_rig(fakes, replica_timeout_s=0.4) as rig:
        asking = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=100, stream=True))
        await until(lambda: bool(front.running and back.told))
        front.old_handles = list(front.running)
        front.hang()
        await until(lambda: bool(back.running))
        assert back.told[-1].give_up
        front.awake.set()
        front.gate.set()
        await until(lambda: front.sessions == 2 and all(r.accepts for r in rig.router.fleet.replicas.values()))
        back.gate.set()
        assert joined(chunks_of((await asking).text)) == text(100)
        await until(lambda: all_free(rig, fakes))
