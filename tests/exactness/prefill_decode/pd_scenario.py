"""Scenarios of prefill and decode apart: who asks for what, on which sides, over which network. Each is made from one
number; who asks is as in `scenario`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tests.exactness.scenario import (
    DELAYS_US,
    NEAR_US,
    STEPS_US,
    longest,
    make_scenario,
    some_matcher,
    with_grammars,
)
from tests.exactness.virtual.virtual_peers import PeerWeather
from tests.exactness.warm.warm_judge import uncached

if TYPE_CHECKING:
    from tests.exactness.scenario import Ask, Scale, Scenario
    from tests.exactness.virtual.virtual_matcher import MatcherWeather

# Enough for what is waiting to be pulled or to be decoded, beside the largest request.
_SPARE = (0, 2, 6, 20, 100)


@dataclass(frozen=True)
class SideWeather:
    """One replica's size and pace."""

    num_pages: int
    rows: int
    depth: int
    lockstep: bool
    tokens_per_step: int
    chunk: int
    partial: int
    prefix_cache: bool
    settle: str
    coalesce: bool
    think_us: int
    step_us: tuple[int, int]
    delay_us: tuple[int, int]
    """Of Grants and Reports."""
    router_us: tuple[int, int]
    """Of what the scheduler says to the router."""


@dataclass(frozen=True)
class PdScenario:
    """`together`: the same requests at one replica that does both, undisturbed. `whole`: the share of them that one
    side serves alone. Moments are virtual microseconds."""

    seed: int
    asks: tuple[Ask, ...]
    together: Scenario
    prefill: tuple[SideWeather, ...]
    decode: tuple[SideWeather, ...]
    peers: PeerWeather
    whole: float
    lease_us: int
    forget: float
    """Chance that the router does not renew a lease."""
    lose_prefill_us: tuple[int, ...]
    """When a prefill worker is lost."""
    lose_decode_us: tuple[int, ...]
    matcher: MatcherWeather | None = None
    """The matcher of every side; None: no ask has a grammar."""
    constrained_row_tokens: int = 1
    """The most tokens of a row whose sequence has a grammar."""


def make_constrained_pd_scenario(seed: int, scale: Scale) -> PdScenario:
    """The scenario of that number, most of whose answers must match a grammar."""
    scenario, rng = make_pd_scenario(seed, scale), np.random.default_rng((seed, 84))
    asks, weather = with_grammars(scenario.asks, rng), some_matcher(rng)
    alone = tuple(replace(ask, abort_us=None) for ask in asks)
    together = replace(scenario.together, asks=alone, matcher=weather)
    forced = int(np.random.default_rng((seed, 85)).choice([1, 3, 8]))
    return replace(scenario, asks=asks, together=together, matcher=weather, constrained_row_tokens=forced)


def make_pd_scenario(seed: int, scale: Scale) -> PdScenario:
    """The scenario of that number. Half of them have fair weather, so that most pages do travel."""
    rng = np.random.default_rng((seed, 81))
    base = make_scenario(seed, scale)
    asks = tuple(
        replace(
            ask,
            follows=None,
            session=0,
            at_us=int(rng.integers(0, 200_000)) if ask.follows is not None else ask.at_us,
            # Prompts that are worth the way.
            own=max(ask.own, int(rng.integers(1, 3 * scale.page_size))),
            deadline_us=None,
            min_tokens=min(ask.min_tokens, ask.max_tokens),
        )
        for ask in base.asks
    )
    least = 1 + -(-min(longest(asks), scale.max_model_len) // scale.page_size)
    fair = bool(rng.random() < 0.5)
    sides = [
        tuple(_some_side(rng, least, lockstep=bool(rng.random() < 0.1)) for _ in range(int(rng.integers(1, 3))))
        for _ in range(2)
    ]
    lost = (tuple(rng.integers(1_000, 300_000, int(rng.integers(0, 3))).tolist()) for _ in range(2))
    lose_prefill_us, lose_decode_us = ((), ()) if fair else lost
    return PdScenario(
        seed=seed,
        asks=asks,
        together=replace(uncached(base), asks=tuple(replace(ask, abort_us=None) for ask in asks)),
        prefill=sides[0],
        decode=sides[1],
        peers=PeerWeather() if fair else _some_peers(rng),
        whole=float(rng.choice([0.0, 0.0, 0.2, 0.6])),
        lease_us=int(rng.choice([1_000_000, 10_000_000])) if fair else int(rng.choice([100_000, 1_000_000])),
        forget=0.0 if fair else float(rng.choice([0.0, 0.0, 0.3])),
        lose_prefill_us=lose_prefill_us,
        lose_decode_us=lose_decode_us,
    )


def _some_side(rng: np.random.Generator, least_pages: int, *, lockstep: bool) -> SideWeather:
    near = rng.random() < 0.4
    delays_us = NEAR_US if near else DELAYS_US
    return SideWeather(
        num_pages=least_pages + int(rng.choice(_SPARE)),
        rows=int(rng.integers(1, 7)),
        depth=int(rng.choice([1, 2, 2, 2, 3])),
        lockstep=lockstep,
        tokens_per_step=int(rng.choice([7, 16, 64, 512])),
        chunk=int(rng.choice([0, 0, 1, 3, 16])),
        partial=int(rng.integers(1, 4)),
        prefix_cache=bool(rng.random() < 0.6),
        settle=str(rng.choice(["launch", "end", "late", "late", "mixed"])),
        coalesce=bool(rng.random() < 0.5),
        think_us=0 if near else int(rng.choice([0, 300, 2_000])),
        step_us=STEPS_US[int(rng.integers(len(STEPS_US)))],
        delay_us=delays_us[int(rng.integers(len(delays_us)))],
        router_us=delays_us[int(rng.integers(len(delays_us)))],
    )


def _some_peers(rng: np.random.Generator) -> PeerWeather:
    return PeerWeather(
        page_us=((10, 200), (500, 5_000), (5_000, 40_000))[int(rng.integers(3))],
        begin_us=int(rng.choice([0, 2_000, 30_000])),
        refuse=float(rng.choice([0.0, 0.0, 0.2])),
        corrupt=float(rng.choice([0.0, 0.0, 0.1])),
        break_off=float(rng.choice([0.0, 0.0, 0.1])),
    )
