"""The matcher in virtual time: the real client, ring and grammars. Its process hears frames late, and may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_worker.matcher.matcher import Matcher
from tests.fakes.worker.local_matcher import LocalLink, LocalMatcher

if TYPE_CHECKING:
    import numpy as np

    from quire_worker.matcher.guidance_backend import GuidanceBackend
    from quire_worker.matcher.lookahead_grammar import LookaheadGrammar
    from quire_worker.matcher.matcher import _ConstrainedSequence
    from quire_worker.matcher.matcher_threads import MatcherThread
    from tests.exactness.events import Events
    from tests.exactness.virtual.virtual_time import VirtualTime


@dataclass(frozen=True)
class MatcherWeather:
    """The matcher's delays and losses. Frames take `delay_us`, least and most, to become masks."""

    delay_us: tuple[int, int]
    lost_us: tuple[int, ...] = ()
    """When its process is lost, each time with all that it holds."""
    busy: int = 0
    """On how many sequences a lost process says that it worked. Two are suspects, of which none may be to blame."""
    mask_slots: int = 8
    processes: int = 1


class InterruptedMatcher(Matcher):
    """A matcher that has no time for some of the masks after forced tokens."""

    def __init__(self, rng: np.random.Generator, *args: Any) -> None:
        super().__init__(*args)
        self._rng = rng

    def _look_ahead(self, sequence: _ConstrainedSequence, grammar: LookaheadGrammar, thread: MatcherThread) -> None:
        kept, grammar._lookahead = grammar._lookahead, int(self._rng.integers(grammar._lookahead + 1))
        super()._look_ahead(sequence, grammar, thread)
        grammar._lookahead = kept


class VirtualMatcher(LocalMatcher):
    """A LocalMatcher that hears each frame some time after it was sent, in order."""

    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        backend: GuidanceBackend,
        vocab_size: int,
        weather: MatcherWeather,
        events: Events,
        row_tokens: int = 1,
    ) -> None:
        super().__init__(
            backend,
            vocab_size,
            weather.mask_slots,
            prompt=False,
            clock=lambda: time.now_us / 1e6,
            processes=weather.processes,
            row_tokens=row_tokens,
            make_matcher=lambda *args: InterruptedMatcher(rng, *args),
        )
        self._time = time
        self._rng = rng
        self._weather = weather
        self._events = events
        self._heard_us = 0
        self.on_send = self._hear_later
        for lost_us in weather.lost_us:
            time.at(lost_us, self._lose)

    def _hear_later(self, link: LocalLink) -> None:
        """A frame was sent: it arrives behind those before it."""
        least, most = self._weather.delay_us
        self._heard_us = max(self._heard_us, self._time.now_us + int(self._rng.integers(least, most + 1)))
        self._time.at(self._heard_us, lambda: self._hear_next(link))

    def _hear_next(self, link: LocalLink) -> None:
        link.hear()

    def _lose(self) -> None:
        """End a process, if there is one."""
        if not self.links:
            return
        lost = int(self._rng.integers(len(self.links)))
        open_sequences = [row.generation for row in self.clients[lost]._by_mask_slot.values() if row.is_open]
        busy = open_sequences[: self._weather.busy] if len(open_sequences) >= self._weather.busy > 1 else []
        self._events["matchers lost"] += 1
        self._events["matchers lost with sequences"] += bool(open_sequences)
        self.links[lost].lose(busy)
