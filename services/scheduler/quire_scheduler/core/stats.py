"""Counters of one core, and rates over recent steps. Monotonic counts: the service turns differences into metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request


@dataclass(slots=True)
class Stats:
    """Counts since the core began."""

    steps: int = 0
    grants: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    prefill_tokens: int = 0
    # By what the request's pages come back: all of them, and of these by stores and loads.
    preemptions: int = 0
    swaps: int = 0
    reclaims: int = 0
    pages_lost: int = 0
    late_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    # Tokens looked for, and found, on the device, at every start.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Prompt tokens of requests whose first token has come, by where their KV came from.
    prompt_computed: int = 0
    prompt_local: int = 0
    prompt_kvstore: int = 0
    prompt_transferred: int = 0
    # Bytes that came from other engines.
    pulled_bytes: int = 0
    # Lookups without an answer in time.
    lookups_failed: int = 0
    # Lookups that were not made, since the router knew that nothing would be found.
    lookups_spared: int = 0
    # Pages that stores brought to the kvstore or found there, that were not stored for want of room in its queue, that
    # it did not take, and that left the device without having been stored.
    offload_pages: int = 0
    offload_dropped: int = 0
    offload_failed: int = 0
    offload_missed: int = 0
    # Tokens whose KV came from the kvstore, by the slowest medium that it was found on.
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    # Transfers of pages to others, by how they ended.
    transfers: dict[str, int] = field(default_factory=dict)

    @property
    def recomputes(self) -> int:
        """Preemptions after which pages are computed again, but for what is left of them."""
        return self.preemptions - self.swaps

    def stepped(self, steps: int, generated: int, prefilled: int) -> None:
        """A Report told of steps and their tokens."""
        self.steps += steps
        self.generation_tokens += generated
        self.prefill_tokens += prefilled

    def late(self, tokens: int) -> None:
        """Tokens came of requests that had left their slots."""
        self.late_tokens += tokens

    def granted(self) -> None:
        """A Grant was made."""
        self.grants += 1

    def searched_device(self, tokens: int, found: int) -> None:
        """A request started; so many of its tokens were looked for, and found, on the device."""
        self.prefix_queries += tokens
        self.prefix_hits += found

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request started for the first time."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def preempted(self, *, swapped: bool) -> None:
        """A running request lost its slot."""
        self.preemptions += 1
        self.swaps += swapped

    def reclaimed(self) -> None:
        """A request lost its spare slot."""
        self.reclaims += 1

    def lost_pages(self) -> None:
        """The worker lost a slot's pages."""
        self.pages_lost += 1

    def pulled(self, num_bytes: int) -> None:
        """Pages arrived from another engine."""
        self.pulled_bytes += num_bytes

    def lookup_spared(self) -> None:
        """A request started without a lookup."""
        self.lookups_spared += 1

    def lookup_failed(self) -> None:
        """The kvstore did not answer in time."""
        self.lookups_failed += 1

    def looked_up(self, tokens: int, found: int) -> None:
        """So many tokens were looked for, and found, in the kvstore."""
        self.cache_queries += tokens
        self.cache_hits += found

    def stored(self, pages: int, failed: int) -> None:
        """A store ended."""
        self.offload_pages += pages
        self.offload_failed += failed

    def store_dropped(self, pages: int) -> None:
        """There was no room to store these pages."""
        self.offload_dropped += pages

    def store_missed(self, pages: int) -> None:
        """These pages were evicted and had not been stored."""
        self.offload_missed += pages

    def loaded(self, medium: str, tokens: int) -> None:
        """Pages arrived."""
        self.loaded_tokens[medium] = self.loaded_tokens.get(medium, 0) + tokens

    def served_prompt(self, request: Request, *, pulled: bool) -> None:
        """Count the request's prompt tokens, once, by where their KV came from: computed, device, kvstore or another
        engine. `pulled`: cached tokens beyond the local ones came from another engine, not from the kvstore."""
        if not request.count_prompt():
            return
        saved = min(request.cached_tokens, request.prompt_len)
        local = min(request.local_tokens, saved)
        self.prompt_local += local
        if pulled:
            self.prompt_transferred += saved - local
        else:
            self.prompt_kvstore += saved - local
        self.prompt_computed += request.prompt_len - saved

    def ended(self, reason: str) -> None:
        """A request left for the reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


# A mean over requests covers the last 64 or so: each new request keeps this share of what was measured before.
_KEEP = 63 / 64
# So many requests make a mean.
_LEAST = 10.0


class Rates:
    """Tokens per second and step time, as exponential means over about the last `horizon_s` seconds of work; and what
    requests need, as exponential means over the last ones."""

    def __init__(self, horizon_s: float = 5.0) -> None:
        self._horizon_s = horizon_s
        self._last_s = 0.0
        self._span_s = 0.0
        self._decode = 0.0
        self._prefill = 0.0
        self._steps = 0.0
        # How many requests left their slots lately, and their seconds in slots.
        self._left = 0.0
        self._left_s = 0.0
        # Known tokens of the requests that started lately, and how many of these had to be computed.
        self._started = 0.0
        self._computed = 0.0

    def idle(self) -> None:
        """Nothing runs: the time until the next Report is no step's."""
        self._last_s = 0.0

    def step(self, now: float, steps: int, decode_tokens: int, prefill_tokens: int) -> None:
        """Count the steps and tokens of a Report that came at `now`. What was counted before is first reduced, the more
        the longer ago the last Report was. The first Report after `idle` is not counted: it only sets the time from
        which the next one is measured."""
        if self._last_s:
            span = max(now - self._last_s, 0.0)
            keep = max(0.0, 1.0 - span / self._horizon_s)
            self._span_s = self._span_s * keep + span
            self._decode = self._decode * keep + decode_tokens
            self._prefill = self._prefill * keep + prefill_tokens
            self._steps = self._steps * keep + steps
        self._last_s = now

    def finish(self, slot_s: float) -> None:
        """A request left its slot for good, after so many seconds in slots."""
        self._left = self._left * _KEEP + 1.0
        self._left_s = self._left_s * _KEEP + slot_s

    def start(self, known_tokens: int, cached_tokens: int) -> None:
        """A request took a slot; the KV of `cached_tokens` of its tokens need not be computed."""
        self._started = self._started * _KEEP + known_tokens
        self._computed = self._computed * _KEEP + max(known_tokens - cached_tokens, 0)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens."""
        return self._per_s(self._decode)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed."""
        return self._per_s(self._prefill)

    @property
    def slot_s(self) -> float:
        """Mean time that a request spends in slots; 0.0 before so many have left that it is a mean."""
        return self._left_s / self._left if self._left >= _LEAST else 0.0

    @property
    def computed_share(self) -> float:
        """Share of the tokens of starting requests whose KV is computed: the rest is cached. 1.0 before the first."""
        return self._computed / self._started if self._started else 1.0

    @property
    def step_ms(self) -> float:
        """Mean time from Report to Report, per step."""
        return self._span_s / self._steps * 1000 if self._steps else 0.0

    def _per_s(self, amount: float) -> float:
        return amount / self._span_s if self._span_s else 0.0
