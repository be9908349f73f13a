"""Scenarios about caches: conversations that share how they begin and come back with all that was said, on few pages,
over tiers that evict, rot and die. Knows nothing of how they are served."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tests.exactness.scenario import Ask, Tiers, make_scenario

if TYPE_CHECKING:
    from tests.exactness.scenario import Scale, Scenario

_SALTS = ("", "", "", "tenant a", "tenant b")


def make_warm_scenario(seed: int, scale: Scale) -> Scenario:
    """The scenario of that number. Its weather is that of `make_scenario`."""
    rng = np.random.default_rng((seed, 80))
    base = make_scenario(seed, scale)
    kvstore, tight = bool(rng.random() < 0.85), bool(rng.random() < 0.4)
    down_us = int(rng.integers(1_000, 300_000))
    store = replace(
        base.store,
        fail_moves=float(rng.choice([0.0, 0.0, 0.2])),
        down_us=(down_us, down_us + int(rng.integers(0, 50_000))) if rng.random() < 0.3 else None,
    )
    return replace(
        base,
        asks=_conversations(rng, base, scale, tight=tight),
        spare_pages=int(rng.integers(0, 8) if tight else rng.choice([0, 1, 2, 4, 8, 16, 60])),
        max_num_seqs=int(rng.integers(3, 7)) if tight else base.max_num_seqs,
        rows=0,
        prefix_cache=bool(rng.random() < 0.75),
        kvstore=kvstore,
        store=store,
        # The others keep what `store` says.
        offload=base.offload if rng.random() < 0.3 else "write-through",
        tiers=_some_tiers(rng) if kvstore and rng.random() < 0.9 else None,
        lost_us=base.lost_us if rng.random() < 0.5 else None,
    )


def _some_tiers(rng: np.random.Generator) -> Tiers:
    return Tiers(
        ram_pages=int(rng.choice([3, 8, 20, 60, 400])),
        below_pages=int(rng.choice([0, 10, 40, 400])),
        below_us=int(rng.choice([50, 400, 3_000])),
        patience_us=int(rng.choice([2_000, 20_000])),
        rot=float(rng.choice([0.0, 0.03, 0.2])),
        strangers=bool(rng.random() < 0.3),
    )


def _conversations(rng: np.random.Generator, weather: Scenario, scale: Scale, *, tight: bool) -> tuple[Ask, ...]:
    """Turns in the order in which they were said, of one conversation after the other. `tight`: all begin at once and
    have long answers, so that pages run out."""
    asks: list[Ask] = []
    system = [int(rng.integers(0, scale.max_model_len // 3)) for _ in range(3)]
    spread_us = 0 if tight else int(rng.choice([0, 5_000, 100_000, 400_000]))
    pool, most = weather.asks, scale.most_asks
    while len(asks) < most:
        if asks and rng.random() < 0.3:
            asks += _near_misses(rng, asks[int(rng.integers(len(asks)))], len(asks), most, spread_us)
            continue
        family, salt = int(rng.integers(0, 3)), str(rng.choice(_SALTS))
        follows, at_us, left = None, int(rng.integers(0, spread_us + 1)), scale.max_model_len - 1 - system[family]
        for turn in range(int(rng.integers(1, 5))):
            own = int(rng.integers(1, scale.max_model_len // 8))
            answer = int(rng.integers(1, scale.max_model_len // (3 if tight else 8)))
            left -= own + answer
            if left < 0 or len(asks) >= most:
                break
            said = replace(
                pool[int(rng.integers(len(pool)))],
                at_us=at_us,
                family=family,
                shared=0 if turn else system[family],
                own=own,
                # Some say the same, word for word.
                salt=int(rng.integers(0, 2)) if rng.random() < 0.4 else 100 + len(asks),
                max_tokens=answer,
                follows=follows,
                cache_salt=salt,
                skip_cache_read=bool(rng.random() < 0.05),
                resumed=int(rng.integers(1, 10)) if rng.random() < 0.1 else 0,
                abort_us=int(rng.integers(0, 150_000)) if rng.random() < 0.1 else None,
                deadline_us=None,
            )
            follows, at_us = len(asks), int(rng.choice([0, 1_000, 20_000, 200_000]))
            asks += _choices(rng, said)
    return tuple(asks)


def _near_misses(rng: np.random.Generator, ask: Ask, place: int, most: int, spread_us: int) -> list[Ask]:
    """The same prompt but for one token, more than once."""
    twist = int(rng.integers(0, 100))
    follows = ask.follows
    return [
        replace(ask, twist=twist, abort_us=None, resumed=0, at_us=int(rng.integers(0, spread_us + 1)), follows=follows)
        for _ in range(min(2, most - place))
    ]


def _choices(rng: np.random.Generator, ask: Ask) -> list[Ask]:
    """n of one prompt; a conversation goes on from the first."""
    count = int(rng.integers(2, 4)) if rng.random() < 0.2 and ask.sampling.temperature else 1
    return [replace(ask, sampling=replace(ask.sampling, sample=index)) for index in range(count)]
