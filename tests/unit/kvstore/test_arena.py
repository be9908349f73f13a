"""The arena against a plain model, and at its edges."""

from __future__ import annotations

import random

import pytest

from quire_kvstore.arena import Arena


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_overlaps_and_loses_nothing(seed: int) -> None:
    rng, arena = random.Random(seed), Arena(64 * 1024)
    held: dict[int, bytes] = {}
    for _ in range(2000):
        if held and rng.random() < 0.48:
            start = rng.choice(list(held))
            with arena.view(start, len(held[start])) as view:
                assert bytes(view) == held.pop(start), "nobody else wrote here"
            arena.free(start)
        else:
            data = rng.randbytes(rng.choice((1, 64, 65, 1000, 4096)))
            offset = arena.allocate(len(data))
            if offset is not None:
                held[offset] = data
                with arena.view(offset, len(data)) as view:
                    view[:] = data
        arena.check_integrity()
    for start in held:
        arena.free(start)
    assert arena.used_bytes == 0
    assert arena.allocate(64 * 1024) == 0, "all fragments have merged"
    arena.close()


def test_it_refuses_what_does_not_fit_and_fills_to_the_last_byte() -> None:
    arena = Arena(256)
    assert arena.allocate(257) is None
    assert [arena.allocate(64) for _ in range(5)] == [0, 64, 128, 192, None]
    arena.free(64)
    assert arena.allocate(65) is None, "rounded up to 128, and only 64 are free"
    assert arena.allocate(1) == 64
    arena.check_integrity()
    arena.close()


def test_freeing_what_is_not_held_is_a_bug_that_shows() -> None:
    arena = Arena(256)
    with pytest.raises(KeyError):
        arena.free(0)
    arena.close()
