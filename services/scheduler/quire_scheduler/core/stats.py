"""Stats: the counters of one core, which never decrease; the service turns their differences into metrics. Rates:
speeds over recent steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request


@dataclass(slots=True)
class Stats:
    """The counts since the core began."""

    steps: int = 0
    grants: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    prefill_tokens: int = 0
    # Preemptions, and how many of them were swaps, whose pages come back by stores and loads.
    preemptions: int = 0
    swaps: int = 0
    reclaims: int = 0
    pages_lost: int = 0
    late_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    # Tokens that were looked for, and found, on the device, counted at every start.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Prompt tokens by the source of their KV, counted at the request's first token.
    prompt_computed: int = 0
    prompt_local: int = 0
    prompt_kvstore: int = 0
    prompt_transferred: int = 0
    # Bytes of pages that were pulled from other engines.
    pulled_bytes: int = 0
    # Lookups that were not answered in time.
    lookups_failed: int = 0
    # Lookups that were not made, because the router knew that they would find nothing.
    lookups_spared: int = 0
    # Pages that stores brought to the kvstore or found there; that found no room in the store queue; that the kvstore
    # did not accept; and that were evicted without having been stored.
    offload_pages: int = 0
    offload_dropped: int = 0
    offload_failed: int = 0
    offload_missed: int = 0
    # Tokens whose KV was loaded from the kvstore, by the slowest medium that held a page.
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    # Transfers of pages to other engines, by the way in which they ended.
    transfers: dict[str, int] = field(default_factory=dict)

    @property
    def recomputes(self) -> int:
        """Preemptions that were not swaps: the request's pages are computed again, except those that are still on the
        device."""
        return self.preemptions - self.swaps

    def stepped(self, steps: int, generated: int, prefilled: int) -> None:
        """Count the steps that a Report told of, and their tokens."""
        self.steps += steps
        self.generation_tokens += generated
        self.prefill_tokens += prefilled

    def late(self, tokens: int) -> None:
        """Count tokens of requests that had left their slots."""
        self.late_tokens += tokens

    def granted(self) -> None:
        """Count a Grant."""
        self.grants += 1

    def searched_device(self, tokens: int, found: int) -> None:
        """Count, at the start of a request, how many tokens were looked for and found on the device."""
        self.prefix_queries += tokens
        self.prefix_hits += found

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the tokens of a prompt, and those among them that need not be computed, at a request's first start."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def preempted(self, *, swapped: bool) -> None:
        """Count a running request that lost its slot and will start again, and whether its pages were swapped."""
        self.preemptions += 1
        self.swaps += swapped

    def reclaimed(self) -> None:
        """Count a request, started ahead of need, that lost its standby slot."""
        self.reclaims += 1

    def lost_pages(self) -> None:
        """Count a slot whose pages the worker lost."""
        self.pages_lost += 1

    def pulled(self, num_bytes: int) -> None:
        """Count bytes of pages that arrived from another engine."""
        self.pulled_bytes += num_bytes

    def lookup_spared(self) -> None:
        """Count a request that went on without a lookup."""
        self.lookups_spared += 1

    def lookup_failed(self) -> None:
        """Count a lookup that failed, or that the kvstore did not answer in time."""
        self.lookups_failed += 1

    def looked_up(self, tokens: int, found: int) -> None:
        """Count how many tokens were looked for and found in the kvstore."""
        self.cache_queries += tokens
        self.cache_hits += found

    def stored(self, pages: int, failed: int) -> None:
        """Count the pages of a store that has ended, and those that failed."""
        self.offload_pages += pages
        self.offload_failed += failed

    def store_dropped(self, pages: int) -> None:
        """Count pages that were not stored when their request gave them up, for lack of room or because they may not be
        sound yet."""
        self.offload_dropped += pages

    def store_missed(self, pages: int) -> None:
        """Count pages that were evicted without having been stored."""
        self.offload_missed += pages

    def loaded(self, medium: str, tokens: int) -> None:
        """Count tokens whose pages arrived from the kvstore, by medium."""
        self.loaded_tokens[medium] = self.loaded_tokens.get(medium, 0) + tokens

    def served_prompt(self, request: Request, *, pulled: bool) -> None:
        """Count the request's prompt tokens, once, by the source of their KV: computed, on the device, kvstore or
        another engine. With `pulled`, cached tokens beyond the local ones came from another engine, else from the
        kvstore."""
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
        """Count a request that left, by the reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


# Means over requests cover about the last 64: with each new request, the earlier ones keep this share of their weight.
_KEEP = 63 / 64
# The fewest requests that make a mean.
_LEAST = 10.0


class Rates:
    """Tokens per second and the time per step, as exponential means over about the last `horizon_s` seconds of work;
    and the needs of requests, as exponential means over the latest requests."""

    def __init__(self, horizon_s: float = 5.0) -> None:
        self._horizon_s = horizon_s
        self._last_s = 0.0
        self._span_s = 0.0
        self._decode = 0.0
        self._prefill = 0.0
        self._steps = 0.0
        # Decayed sums: the requests that left their slots, and the seconds that they spent in slots.
        self._left = 0.0
        self._left_s = 0.0
        # Decayed sums: the known tokens of the requests that started, and those of them that had to be computed.
        self._started = 0.0
        self._computed = 0.0

    def idle(self) -> None:
        """Note that nothing runs, so that the time until the next Report is not counted as time of a step."""
        self._last_s = 0.0

    def step(self, now: float, steps: int, decode_tokens: int, prefill_tokens: int) -> None:
        """Count the steps and tokens of a Report that came at `now`. Earlier counts are reduced first, the more the
        longer ago the last Report came; `horizon_s` after it, nothing is left of them. The first Report of all, and the
        first after `idle`, is not counted and reduces nothing: it only sets the time from which the next one is
        measured. So counts from before an idle time stay in full, however long that time was."""
        if self._last_s:
            span = max(now - self._last_s, 0.0)
            keep = max(0.0, 1.0 - span / self._horizon_s)
            self._span_s = self._span_s * keep + span
            self._decode = self._decode * keep + decode_tokens
            self._prefill = self._prefill * keep + prefill_tokens
            self._steps = self._steps * keep + steps
        self._last_s = now

    def finish(self, slot_s: float) -> None:
        """Count a request that left its slot for good, after `slot_s` seconds in slots."""
        self._left = self._left * _KEEP + 1.0
        self._left_s = self._left_s * _KEEP + slot_s

    def start(self, known_tokens: int, cached_tokens: int) -> None:
        """Count a request that took a slot; `cached_tokens` of its tokens need not be computed."""
        self._started = self._started * _KEEP + known_tokens
        self._computed = self._computed * _KEEP + max(known_tokens - cached_tokens, 0)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self._per_s(self._decode)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Computed prompt tokens per second."""
        return self._per_s(self._prefill)

    @property
    def slot_s(self) -> float:
        """The mean number of seconds that a request spends in slots; 0.0 before enough requests have left for a
        mean."""
        return self._left_s / self._left if self._left >= _LEAST else 0.0

    @property
    def computed_share(self) -> float:
        """The share of a starting request's tokens that must be computed; the others are cached. 1.0 before the first
        request."""
        return self._computed / self._started if self._started else 1.0

    @property
    def step_ms(self) -> float:
        """The mean time from Report to Report, in milliseconds per step."""
        return self._span_s / self._steps * 1000 if self._steps else 0.0

    def _per_s(self, amount: float) -> float:
        return amount / self._span_s if self._span_s else 0.0
