"""Scenarios: who asks for what and when, on which replica, over which delays. Each is made from one number.

Knows what may be asked, and nothing of how it is served. Sizes are by `Scale`, so that one generator fits the paced
worker (thousands of scenarios) and a real model (hundreds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.logit_controls import MAX_ALLOWED_TOKENS, LogitControls
from quire_common.repetition import RepetitionDetection
from quire_common.sequence import Sampling
from quire_common.thinking import ThinkingBudget
from quire_worker.paced.random_yields import Odds
from tests.exactness.virtual.virtual_kvstore import StoreWeather
from tests.exactness.virtual.virtual_matcher import MatcherWeather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Each row draws in each step.
ONE_EACH = Odds(held=0.0, wrong=0.0)
# Waits and steps that scenarios draw from, in microseconds: (least, most).
NEAR_US = ((0, 0), (0, 0), (0, 1_000))
DELAYS_US = ((0, 0), (0, 1_000), (1_000, 1_000), (4_000, 6_000), (0, 20_000), (15_000, 20_000))
STEPS_US = ((600, 700), (600, 3_000), (2_000, 2_400), (4_000, 6_000), (600, 12_000), (11_000, 12_000))
POLICIES = ("fcfs", "fcfs", "priority", "fair")
OFFLOADS = ("write-through", "write-through", "on-evict", "on-evict", "selective", "off")


@dataclass(frozen=True)
class Scale:
    """Sizes of one kind of worker."""

    vocab_size: int
    page_size: int
    max_model_len: int
    longest_prompt: int
    most_tokens: int
    most_asks: int


@dataclass(frozen=True)
class Tiers:
    """A real kvstore's memory, for few pages, and a medium below it that is slow, bounded and rots."""

    ram_pages: int
    below_pages: int
    below_us: int
    """Of a page on its way up."""
    patience_us: int
    """How long a lookup waits for what is below."""
    rot: float
    """Pages that are spoiled below or on the wire, or cut short."""
    strangers: bool
    """Another model, and another KV group, have stored pages of the same hashes."""


@dataclass(frozen=True)
class Ask:
    """One request. Times are virtual microseconds, `abort_us` and `deadline_us` after its arrival. Who `follows`
    another arrives `at_us` after that one's end, and begins with all that was said there."""

    at_us: int
    family: int
    shared: int
    own: int
    salt: int
    sampling: Sampling
    repetition: RepetitionDetection | None
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    session: int
    priority: int
    tenant: str
    resumed: int
    skip_cache_read: bool
    abort_us: int | None
    deadline_us: int | None
    follows: int | None = None
    """The place of another ask."""
    cache_salt: str = ""
    twist: int | None = None
    """Where in the prompt one token is another one."""
    thinking: ThinkingBudget | None = None
    begins_thinking: bool = False
    """Whether the prompt ends with the start mark."""
    grammar: str = ""
    """The grammar that the answer must match, over the letters that the tokens stand for; empty: there is none."""

    def prompt(self, scale: Scale, said: np.ndarray | None = None) -> np.ndarray:
        """Families share how they begin; who follows goes on from what was `said`."""
        head = np.random.default_rng(1_000 + self.family).integers(0, scale.vocab_size, self.shared)
        if said is not None:
            head = np.concatenate([said, head])
        tail = np.random.default_rng((2_000, self.salt)).integers(0, scale.vocab_size, self.own)
        tokens = np.concatenate([head, tail]).astype(np.int32)
        if self.twist is not None:
            place = self.twist % len(tokens)
            tokens[place] = (tokens[place] + 1) % scale.vocab_size
        if self.thinking is not None and self.begins_thinking:
            mark = self.thinking.start_ids[-len(tokens) :]
            tokens[-len(mark) :] = mark
        return tokens


@dataclass(frozen=True)
class Scenario:
    """One life of a replica. `depth` is how many steps a free-running worker has in flight; `settle` says when a step's
    work is done and seen: see VirtualDevice."""

    seed: int
    asks: tuple[Ask, ...]
    spare_pages: int
    depth: int
    max_num_seqs: int
    rows: int
    policy: str
    tokens_per_step: int
    chunk: int
    partial: int
    beside: int
    grant_us: tuple[int, int]
    report_us: tuple[int, int]
    step_us: tuple[int, int]
    think_us: int
    coalesce: bool
    settle: str
    kvstore: bool
    store: StoreWeather
    lose_rows: float
    lost_us: int | None
    """When the scheduler is lost and another takes its place."""
    token_width: int
    """Tokens per slot that the scheduler keeps in columns before it hands them to their request."""
    leave_us: int | None
    """When the router of session 0 is lost."""
    prefix_cache: bool
    tiers: Tiers | None = None
    """With `kvstore`; None: one of a single tier that is as `store` says."""
    offload: str = "write-through"
    """When pages go to the kvstore."""
    row_tokens: int = 1
    """The most tokens that a decode row may sample in one step."""
    constrained_row_tokens: int = 1
    """The limit of a row whose sequence has a grammar: its drafts are forced tokens."""
    odds: Odds = ONE_EACH
    """Chances of rows that are held, and of drafts that are wrong."""
    matcher: MatcherWeather | None = None
    """None: no ask has a grammar."""


@dataclass(frozen=True)
class Mix:
    """What the scenarios of one kind are about. Ranges are shares of the scale's longest or most, the others
    probabilities."""

    prompts: tuple[float, float]
    answers: tuple[float, float]
    asks: tuple[float, float]
    spread_us: tuple[int, ...]
    scarce: float
    """Most pages to spare, as a share of what all rows together may grow by; 0: few or many."""
    ends_by_length: float
    aborts: float
    near: float
    """Delays so short that a Grant comes back while the step beside the one that it answers still runs."""
    turns: float = 0.0
    """Asks that go on from what an earlier one was answered; there is a kvstore then."""


# Everything, everywhere.
PLAIN = Mix((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0, 5_000, 50_000, 300_000), 0.0, 0.3, 0.25, 0.2)
# All at once with short prompts and long answers: pages run out while all are under way.
CROWD = Mix((0.0, 0.2), (0.5, 1.0), (0.5, 1.2), (0, 5_000), 0.5, 0.8, 0.2, 0.3)
# Short answers and many aborts on few pages, close by: what one sequence leaves the next one takes at once.
CHURN = Mix((0.1, 0.5), (0.0, 0.3), (0.8, 1.4), (0, 5_000, 50_000), 0.2, 0.3, 0.4, 0.8)

# Conversations on few pages: what returns must be found in the kvstore, or be computed again.
TALK = Mix((0.3, 0.9), (0.1, 0.4), (1.0, 1.8), (5_000, 50_000, 300_000), 0.1, 0.3, 0.1, 0.4, turns=0.6)


def longest(asks: Sequence[Ask]) -> int:
    """Of prompt and answer together."""
    return max(_longest_of_each(asks))


def _longest_of_each(asks: Sequence[Ask]) -> list[int]:
    most: list[int] = []
    for ask in asks:
        said = 0 if ask.follows is None else most[ask.follows]
        most.append(said + ask.shared + ask.own + ask.max_tokens)
    return most


def without(asks: Sequence[Ask], place: int) -> tuple[Ask, ...]:
    """The asks without one, and without those that follow it."""
    places: dict[int, int] = {}
    left: list[Ask] = []
    for index, ask in enumerate(asks):
        if index != place and (ask.follows is None or ask.follows in places):
            places[index] = len(left)
            left.append(ask if ask.follows is None else replace(ask, follows=places[ask.follows]))
    return tuple(left)


def make_scenario(seed: int, scale: Scale) -> Scenario:
    """The scenario of that number."""
    rng = np.random.default_rng((seed, 77))
    mix = (PLAIN, CROWD, CHURN, TALK)[int(rng.choice(4, p=[0.35, 0.25, 0.2, 0.2]))]
    kvstore = bool(rng.random() < 0.5) or mix is TALK
    rows = int(rng.integers(1, 7))
    growth = int(mix.scarce * rows * scale.most_tokens / scale.page_size)
    near = rng.random() < mix.near
    delays_us = NEAR_US if near else DELAYS_US
    return Scenario(
        seed=seed,
        asks=tuple(_thinking(_controlled(_some_asks(rng, scale, mix, kvstore=kvstore), scale, seed), scale, seed)),
        spare_pages=int(rng.integers(0, growth + 1) if mix.scarce else rng.choice([0, 1, 2, 4, 8, 16, 40, 100])),
        depth=int(rng.choice([1, 2, 2, 2, 2, 2, 3])),
        max_num_seqs=rows,
        # Sometimes the scheduler is told to use fewer rows than the worker has.
        rows=max(rows - 1, 1) if rng.random() < 0.1 else 0,
        policy=str(rng.choice(POLICIES)),
        tokens_per_step=int(rng.choice([7, 16, 64, 512])),
        chunk=int(rng.choice([0, 0, 1, 3, scale.page_size, 4 * scale.page_size])),
        partial=int(rng.integers(1, 4)),
        beside=int(rng.choice([0, 0, 1, 5, 16])),
        grant_us=delays_us[int(rng.integers(len(delays_us)))],
        report_us=delays_us[int(rng.integers(len(delays_us)))],
        step_us=STEPS_US[int(rng.integers(len(STEPS_US)))],
        think_us=0 if near else int(rng.choice([0, 300, 2_000])),
        coalesce=bool(rng.random() < 0.5),
        settle=str(rng.choice(["launch", "end", "late", "late", "mixed"])),
        kvstore=kvstore,
        store=_some_weather(rng, seed, kvstore=kvstore),
        lose_rows=float(rng.choice([0.0, 0.0, 0.03])),
        lost_us=int(rng.integers(1_000, 200_000)) if rng.random() < 0.15 else None,
        token_width=int(rng.choice([1, 2, 5, 256])),
        leave_us=int(rng.integers(1_000, 200_000)) if rng.random() < 0.1 else None,
        prefix_cache=bool(rng.random() < (0.5 if mix is TALK else 0.7)),
        offload=str(np.random.default_rng((seed, 80)).choice(OFFLOADS)),
    )


def make_yield_scenario(seed: int, scale: Scale) -> Scenario:
    """The scenario of that number, whose rows draw no token, one or several in a step."""
    rng = np.random.default_rng((seed, 82))
    odds = Odds(held=float(rng.choice([0.0, 0.1, 0.3, 0.6])), wrong=float(rng.choice([0.0, 0.2, 0.2, 0.5, 1.0])))
    row_tokens = int(rng.choice([1, 2, 3, 4, 6])) if odds.held else int(rng.choice([2, 3, 4, 6]))
    return replace(make_scenario(seed, scale), row_tokens=row_tokens, odds=odds)


# Expressions of letters that small vocabularies have too: some leave one token, some many, some end late or never.
GRAMMARS = (
    "start: /[A-F]{2,9}/",
    'start: "0" /[3-9]+/ "A"',
    'start: ("AB" | "CD")+ "0"',
    "start: /([A-Z][a-e]?){1,12}/",
    'start: "ABCDEFGH"',
    'start: "<" start ">" | "A"',
    "start: /.*/",
)


def make_constrained_scenario(seed: int, scale: Scale) -> Scenario:
    """The scenario of that number, most of whose answers must match a grammar. Its matcher is slow, and lost at times.

    Other parameters that forbid tokens are left out: an answer that forbids itself what its grammar wants is an error.
    """
    rng = np.random.default_rng((seed, 83))
    scenario = make_yield_scenario(seed, scale) if rng.random() < 0.4 else make_scenario(seed, scale)
    asks = with_grammars(scenario.asks, rng)
    forced = int(np.random.default_rng((seed, 84)).choice([1, 2, 3, 4, 8]))
    return replace(scenario, asks=asks, matcher=some_matcher(rng), constrained_row_tokens=forced)


def with_grammars(asks: Sequence[Ask], rng: np.random.Generator) -> tuple[Ask, ...]:
    """The asks, most of them with a grammar."""
    found = []
    for ask in asks:
        sampling = replace(ask.sampling, controls=None, processors=())
        chosen = str(rng.choice(GRAMMARS)) if rng.random() < 0.7 else ""
        found.append(replace(ask, grammar=chosen, sampling=sampling, thinking=None) if chosen else ask)
    return tuple(found)


def some_matcher(rng: np.random.Generator) -> MatcherWeather:
    """A matcher that is slow or fast, and lost at times or never."""
    delays_us = ((0, 0), (0, 300), (500, 3_000), (0, 20_000))
    return MatcherWeather(
        delay_us=delays_us[int(rng.integers(len(delays_us)))],
        lost_us=tuple(sorted(int(each) for each in rng.integers(0, 200_000, int(rng.choice([0, 0, 1, 3, 8]))))),
        busy=int(rng.choice([0, 0, 2])),
        mask_slots=(mask_slots := int(rng.choice([1, 2, 8]))),
        processes=min(mask_slots, int(rng.choice([1, 1, 3]))),
    )


def _some_weather(rng: np.random.Generator, seed: int, *, kvstore: bool) -> StoreWeather:
    """A kvstore that is good or bad at some things."""
    delay_us = int(rng.choice([0, 500, 8_000, 40_000]))
    fail_moves = float(rng.choice([0.0, 0.3])) if kvstore else 0.0
    more = np.random.default_rng((seed, 79))
    down_us = int(more.integers(0, 200_000))
    return StoreWeather(
        pages=int(more.choice([2, 6, 20, 100, 1_000_000, 1_000_000])),
        delay_us=delay_us,
        fail_moves=fail_moves,
        slow_moves=float(more.choice([0.0, 0.0, 0.2])),
        fail_lookups=float(more.choice([0.0, 0.0, 0.2])),
        corrupt=float(more.choice([0.0, 0.0, 0.1])),
        down_us=(down_us, down_us + int(more.integers(1_000, 200_000))) if more.random() < 0.15 else None,
    )


def _some_asks(rng: np.random.Generator, scale: Scale, mix: Mix, *, kvstore: bool) -> tuple[Ask, ...]:
    """In order of arrival, with those that follow others at the end."""
    asks: list[Ask] = []
    wanted, spread_us = _within(rng, mix.asks, scale.most_asks), int(rng.choice(mix.spread_us))
    while len(asks) < wanted:
        ask = _an_ask(rng, scale, mix, spread_us, len(asks))
        if asks and kvstore and rng.random() < 0.4:
            ask = _echo(rng, ask, asks[int(rng.integers(len(asks)))])
        elif asks and rng.random() < mix.turns:
            ask = _next_turn(rng, ask, asks, scale)
        siblings = int(rng.integers(2, 4)) if rng.random() < 0.15 and ask.sampling.temperature else 1
        asks += [replace(ask, sampling=replace(ask.sampling, sample=index)) for index in range(siblings)]
    order = sorted(range(len(asks)), key=lambda p: asks[p].at_us if asks[p].follows is None else math.inf)
    places = {place: index for index, place in enumerate(order)}
    ordered = (asks[place] for place in order)
    return tuple(ask if ask.follows is None else replace(ask, follows=places[ask.follows]) for ask in ordered)


def _controlled(asks: tuple[Ask, ...], scale: Scale, seed: int) -> Iterator[Ask]:
    """Some ask something of their logits: what is drawn then depends on all that was drawn before."""
    rng = np.random.default_rng((seed, 78))
    for ask in asks:
        controls = _some_controls(rng, scale.vocab_size) if rng.random() < 0.3 else None
        repetition = RepetitionDetection(2, 1, int(rng.integers(2, 4))) if rng.random() < 0.1 else None
        yield replace(ask, sampling=replace(ask.sampling, controls=controls), repetition=repetition)


def _thinking(asks: Iterator[Ask], scale: Scale, seed: int) -> Iterator[Ask]:
    """Some may think only so long, and some have their logits changed by Python."""
    rng = np.random.default_rng((seed, 81))
    for ask in asks:
        # Of few tokens, so that marks half drawn, and drawn twice, are met.
        few = rng.integers(0, scale.vocab_size, 3)
        start, end = (tuple(rng.choice(few, int(rng.integers(1, most))).tolist()) for most in (3, 4))
        budget = ThinkingBudget(start, end, int(rng.choice([0, 1, 2, 5, 12])))
        thinks, begins = rng.random(2) < (0.2, 0.8)
        processors = ("contrary",) if rng.random() < 0.15 else ()
        given = replace(ask, sampling=replace(ask.sampling, processors=processors))
        yield replace(given, thinking=budget, begins_thinking=bool(begins)) if thinks else given


def _some_controls(rng: np.random.Generator, vocab_size: int) -> LogitControls:
    bias = {int(token): float(rng.choice([-100.0, -2.0, 3.0])) for token in rng.integers(0, vocab_size, 3)}
    drawn = rng.integers(0, vocab_size, min(3 * vocab_size // 4, MAX_ALLOWED_TOKENS))
    few = tuple(sorted({int(token) for token in drawn}))
    words = tuple(tuple(int(t) for t in rng.integers(0, vocab_size, int(rng.integers(1, 3)))) for _ in range(40))
    return LogitControls(
        presence_penalty=float(rng.choice([0.0, 0.5, 2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.5, -0.25])),
        repetition_penalty=float(rng.choice([1.0, 1.25, 0.75])),
        logit_bias=tuple(sorted(bias.items())) if rng.random() < 0.3 else (),
        allowed_token_ids=few if rng.random() < 0.2 else (),
        bad_words=words if rng.random() < 0.3 else (),
    )


def _within(rng: np.random.Generator, share: tuple[float, float], most: int) -> int:
    """At least one."""
    return max(int(rng.integers(int(share[0] * most), int(share[1] * most) + 1)), 1)


def _an_ask(rng: np.random.Generator, scale: Scale, mix: Mix, spread_us: int, index: int) -> Ask:
    length = _within(rng, mix.prompts, scale.longest_prompt)
    shared = int(rng.integers(0, length + 1)) if rng.random() < 0.7 else 0
    ends_by_length = bool(rng.random() < mix.ends_by_length)
    stops = rng.integers(0, scale.vocab_size, 0 if ends_by_length else int(rng.choice([0, 0, 1, 3])))
    return Ask(
        at_us=int(rng.integers(0, spread_us + 1)),
        family=int(rng.integers(0, 3)),
        shared=shared,
        own=length - shared,
        salt=int(rng.integers(0, 4)) if rng.random() < 0.5 else 10 + index,
        sampling=_a_sampling(rng),
        repetition=None,
        max_tokens=_within(rng, mix.answers, scale.most_tokens),
        min_tokens=int(rng.choice([0, 0, 2, 8])),
        stop_token_ids=tuple(int(token) for token in stops),
        ignore_eos=ends_by_length,
        session=int(rng.integers(0, 3)),
        priority=int(rng.integers(-2, 3)),
        tenant=str(rng.choice(["a", "b"])),
        resumed=int(rng.integers(1, 10)) if rng.random() < 0.2 else 0,
        skip_cache_read=bool(rng.random() < 0.1),
        abort_us=int(rng.integers(0, 150_000)) if rng.random() < mix.aborts else None,
        deadline_us=int(rng.integers(1_000, 300_000)) if rng.random() < 0.05 else None,
    )


def _echo(rng: np.random.Generator, ask: Ask, earlier: Ask) -> Ask:
    """The same prompt as before, later: by then the kvstore may have its pages."""
    at_us = earlier.at_us + int(rng.integers(0, 400_000))
    same = replace(ask, family=earlier.family, shared=earlier.shared, own=earlier.own, salt=earlier.salt)
    return replace(same, at_us=at_us, follows=earlier.follows)


def _next_turn(rng: np.random.Generator, ask: Ask, asks: list[Ask], scale: Scale) -> Ask:
    """More is said where an earlier answer ended, if the model's context allows."""
    place = int(rng.integers(len(asks)))
    own, at_us = int(rng.integers(1, 2 * scale.page_size)), int(rng.integers(0, 200_000))
    turn = replace(ask, at_us=at_us, shared=0, own=own, follows=place)
    return turn if _longest_of_each([*asks, turn])[-1] < scale.max_model_len else ask


def _a_sampling(rng: np.random.Generator) -> Sampling:
    logprobs = int(rng.choice([-1, -1, 0, 2]))
    if rng.random() < 0.4:
        return Sampling(logprobs=logprobs)
    sampling = Sampling(
        temperature=float(rng.choice([0.7, 1.0, 1.5])),
        top_k=int(rng.choice([0, 0, 5, 40])),
        top_p=float(rng.choice([1.0, 1.0, 0.9])),
        seed=int(rng.choice([1, 2, 2**63 + 11])),
        logprobs=logprobs,
    )
    # Of a third, whichever the other parameters are.
    return replace(sampling, typical_p=0.8) if sampling.seed == 2 else sampling
