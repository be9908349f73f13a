"""The answer of a beam search has right character offsets, and its large parts are built off the event loop."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from quire_common.errors import Overloaded
from quire_common.sequence import Sampling
from quire_router import servicer
from quire_router.requests import beam_search
from quire_router.requests.beam_search import BeamSearch, character_offsets
from quire_router.requests.beams import Beam
from quire_router.sequences.delta import LogprobEntry
from quire_router.sequences.job import Caller, GenerateJob
from quire_router.sequences.logprob_entries import pack_entry
from tests.unit.router.makers import NoTokenBytes, make_generation, make_job


@pytest.mark.parametrize("seed", range(20))
def test_character_offsets_equal_those_of_decoded_prefixes(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(100):
        pieces = [
            bytes(drawn.choices(b"a\xe6\xb1\x89\xf0\x9f\x98\x80\xc3\xa4\xed\xa0\xff", k=drawn.randint(0, 4)))
            for _ in range(drawn.randint(0, 12))
        ]
        beginnings = [b"".join(pieces[: i + 1]) for i in range(len(pieces))]
        wanted = [min(len(text.decode("utf-8", "ignore")), 9) for text in beginnings]
        assert character_offsets(pieces, 9) == wanted, pieces


def test_character_offsets_of_a_long_text_take_linear_time() -> None:
    """To decode the whole answer after each token took 438 ms of the event loop at 16,384 tokens."""
    pieces = ["汉".encode()] * 65_536
    started = time.thread_time()
    assert character_offsets(pieces, 1 << 20)[-1] == 65_536
    assert time.thread_time() - started < 1.0


class FakeEncoder:
    async def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        return "x" * len(ids)


@pytest.mark.parametrize(("tokens", "in_loop"), [(10, True), (40_000, False)])
async def test_logprobs_of_a_long_beam_are_computed_off_the_event_loop(
    tokens: int, in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(pieces: Any, most: int) -> list[int]:
        threads.append(threading.get_ident())
        return character_offsets(pieces, most)

    monkeypatch.setattr(beam_search, "character_offsets", noted)
    parts: Any = FakeEncoder()
    token_bytes: Any = NoTokenBytes()
    search = BeamSearch(parts, parts, token_bytes)
    entry = pack_entry(97, -1.0, 1, np.array([97], np.int32).tobytes(), np.array([-1.0], np.float32).tobytes())
    beam = Beam(np.full(tokens, 97, np.int32), -1.0, (entry,) * tokens)
    delta = await search._delta(GenerateJob("m", (), sampling=Sampling(logprobs=1)), 0, beam, "")
    assert delta.offsets == list(range(1, tokens + 1)) and delta.entries[0] == LogprobEntry(
        97, -1.0, 1, delta.entries[0].top_ids, delta.entries[0].top_logprobs
    )
    assert [thread == threading.get_ident() for thread in threads] == [in_loop]


def test_grpc_answers_are_built_one_at_a_time_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, those with many alternatives held up the event loop."""
    made: list[Any] = []

    class Format:
        def __init__(self, generation: Any) -> None:
            pass

        def delta(self, delta: Any) -> Any:
            made.append(delta)
            return delta

        def finish(self, last: Any) -> Any:
            return (last, "usage")

    monkeypatch.setattr(servicer, "GenerateFormat", Format)
    deltas: Any = ["a", "b", "c"]
    responses: Any = servicer._whole_responses(make_generation(make_job()), deltas)
    assert next(responses) == "a" and made == ["a"]
    assert list(responses) == ["b", ("c", "usage")]


async def test_refused_beam_search_is_neither_tokenized_nor_charged() -> None:
    class Full:
        def admitted(self, caller: Caller, weight: int) -> None:
            raise Overloaded("TOO_MANY_REQUESTS", "m", "f")

        async def render(self, job: GenerateJob, caller: Caller) -> None:
            pytest.fail("it was tokenized")

    full: Any = Full()
    with pytest.raises(Overloaded):
        await BeamSearch(full, full, full).run(GenerateJob("m", ()), Caller("r"), time.monotonic_ns())
