"""Open loops of several API keys at once, and the outcomes of their requests. It knows nothing of the services."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire.bench.load import PlannedRequest, arrivals
from quire.bench.load_processes import run_load
from quire.bench.outcome import Outcome
from quire.bench.statistics import percentile
from quire.bench.target import Target

_PROMPT_WORDS = 40
_WORDS = ("the", "town", "river", "morning", "people", "house", "bright", "noise", "came", "went", "old", "road")
_REFUSALS = ("HTTP 429", "HTTP 503")
RECOVERED_SHARE = 0.2
"""An overload is over when no larger share of a second's requests is refused or late."""


@dataclass(frozen=True)
class Stream:
    """Requests of one API key at `rate` per second, from `begin_s` on, for `seconds`, with Poisson arrivals."""

    name: str
    key: str
    rate: float
    seconds: float
    begin_s: float = 0.0


@dataclass(frozen=True)
class Heard:
    """The outcomes of one stream's requests. `begin_s` and `end_s` are times on the same clock as the outcomes'."""

    begin_s: float
    end_s: float
    outcomes: list[Outcome]

    @property
    def admitted(self) -> list[Outcome]:
        """Return the outcomes of requests that have an answer."""
        return [outcome for outcome in self.outcomes if outcome.ok]

    @property
    def refused(self) -> list[Outcome]:
        """Return the outcomes of requests that were refused with 429 or 503."""
        return [outcome for outcome in self.outcomes if _refused(outcome)]

    @property
    def refused_share(self) -> float:
        """Return the share of all requests that was refused."""
        return len(self.refused) / len(self.outcomes)

    @property
    def failures(self) -> list[str]:
        """Return the errors of all other requests."""
        return [outcome.error for outcome in self.outcomes if outcome.error and not _refused(outcome)]

    def first_token_ms(self, percent: float) -> float:
        """Return a percentile of the time to the first token of admitted requests."""
        return percentile(sorted(outcome.ttft_s * 1e3 for outcome in self.admitted), percent)

    def first_gap_ms(self, percent: float) -> float:
        """Return a percentile of the time from the first token to the second. A request that starts before its turn to
        decode waits there."""
        return percentile(sorted(outcome.gaps_s[0] * 1e3 for outcome in self.admitted if outcome.gaps_s), percent)

    def refusal_ms(self, percent: float) -> float:
        """Return a percentile of the time until a refusal."""
        return percentile(sorted((outcome.ended_s - outcome.sent_s) * 1e3 for outcome in self.refused), percent)

    def tokens_per_s(self) -> float:
        """Return the tokens per second of answers that ended within the stream's time."""
        ended = [outcome for outcome in self.admitted if outcome.last_s <= self.end_s]
        return sum(outcome.output_tokens for outcome in ended) / (self.end_s - self.begin_s)

    def recovery_s(self, limit_ms: float) -> float:
        """Return the end of the last bad second, in seconds after the stream's begin; 0.0 if there is none. A second is
        bad if more than `RECOVERED_SHARE` of its requests were not admitted, or had their first token after the limit.

        A share is allowed, since Poisson arrivals at half of the capacity have bursts, some of which a short limit of
        waiting refuses.
        """
        sent, late = Counter[int](), Counter[int]()
        for each in self.outcomes:
            second = int(each.sent_s - self.begin_s)
            sent[second] += 1
            late[second] += not each.ok or each.ttft_s * 1e3 > limit_ms
        return max((second + 1.0 for second in sent if late[second] > RECOVERED_SHARE * sent[second]), default=0.0)


def run_streams(target: Target, streams: Sequence[Stream], tokens: int, seed: int) -> dict[str, Heard]:
    """Send the requests of all streams on time. Each asks for an answer of 0.5 to 1.5 x `tokens` tokens. Returns the
    outcomes by stream."""
    rng = random.Random(seed)
    plan: list[PlannedRequest] = []
    ends: list[int] = []
    for stream in streams:
        of_key = replace(target, headers={"Authorization": f"Bearer {stream.key}"})
        for at_s in arrivals(max(1, round(stream.rate * stream.seconds)), stream.rate, 1.0, rng.randrange(2**32)):
            words = " ".join(rng.choices(_WORDS, k=_PROMPT_WORDS))
            prompt, length = f"{rng.getrandbits(48):x} {words}", rng.randint(tokens // 2, tokens + tokens // 2)
            body = of_key.request(prompt, length, f"overload-{seed}-{len(plan)}")
            plan.append(PlannedRequest(len(plan), stream.begin_s + at_s, body))
        ends.append(len(plan))
    begin_s, outcomes = run_load(target, plan)
    return {
        stream.name: Heard(begin_s + stream.begin_s, begin_s + stream.begin_s + stream.seconds, outcomes[first:last])
        for stream, first, last in zip(streams, [0, *ends], ends, strict=False)
    }


def cpu_shares(before: Mapping[str, float], after: Mapping[str, float], began_s: float) -> dict[str, float]:
    """Return the share of a core that each process used since `began_s`, from its CPU seconds before and after."""
    passed_s = time.perf_counter() - began_s
    return {name: (after[name] - before[name]) / passed_s for name in before}


def _refused(outcome: Outcome) -> bool:
    return outcome.error.startswith(_REFUSALS)
