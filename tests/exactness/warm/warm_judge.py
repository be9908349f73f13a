"""Serves a scenario without any cache, with all of them, and once more by another replica that shares the kvstore: who
hears another token or another logprob than without a cache was lied to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.finish import FinishReason
from tests.exactness.clients import LEFT
from tests.exactness.events import Events
from tests.exactness.judge import Wrong, compare, undisturbed
from tests.exactness.virtual.tiered_store import KeptPages
from tests.exactness.virtual.virtual_replica import VirtualReplica
from tests.exactness.warm.hit_rights import HitRights

if TYPE_CHECKING:
    from tests.exactness.clients import Heard
    from tests.exactness.judge import Wanted
    from tests.exactness.scenario import Scenario
    from tests.exactness.subject import Subject

# So many that nobody is preempted, beside the largest request.
_PLENTY = 100


def judge_warm(subject: Subject, scenario: Scenario) -> Events:
    """Raise Wrong, or tell what happened in the lives with caches."""
    wanted, events = undisturbed(subject, scenario), Events()
    cold = _live(subject, uncached(scenario), wanted, None, None, events=Events(), lockstep=True)
    kept = None if scenario.tiers is None else KeptPages(scenario.tiers, subject.info)
    rights = HitRights(subject.scale.page_size, wanted)
    for name in ("first", "second") if kept is not None else ("first",):
        happened = Events()
        warm = _live(subject, scenario, wanted, kept, rights, events=happened, lockstep=False)
        events.update(happened)
        events.update({f"{name} replica: {what}": happened[what] for what in ("local hits", "kvstore hits")})
        for place, heard in warm.items():
            _equal(scenario, place, heard, cold[place])
    return events


def uncached(scenario: Scenario) -> Scenario:
    """The same asks where nothing is kept, nothing is short, nothing goes wrong and nobody leaves."""
    return replace(
        scenario,
        asks=tuple(replace(ask, abort_us=None, deadline_us=None) for ask in scenario.asks),
        prefix_cache=False,
        kvstore=False,
        tiers=None,
        spare_pages=_PLENTY,
        lose_rows=0.0,
        lost_us=None,
        leave_us=None,
    )


def _live(
    subject: Subject,
    scenario: Scenario,
    wanted: dict[int, Wanted],
    kept: KeptPages | None,
    rights: HitRights | None,
    *,
    events: Events,
    lockstep: bool,
) -> dict[int, Heard]:
    mode = "without a cache" if lockstep else "with caches"
    sequences = {place: want.sequence for place, want in wanted.items()}
    try:
        life = VirtualReplica(subject, scenario, lockstep=lockstep, sequences=sequences, kept=kept, rights=rights)
        heard = life.run()
        for place, one in heard.items():
            compare(scenario, place, one, wanted[place])
    except Exception as error:
        raise Wrong(f"scenario {scenario.seed} {mode}: {type(error).__name__}: {error}") from error
    events.update(life.events)
    return heard


def _equal(scenario: Scenario, place: int, warm: Heard, cold: Heard) -> None:
    """To the last bit, as far as it was heard."""
    count = len(warm.tokens)
    if warm.tokens != cold.tokens[:count] or warm.logprobs != cold.logprobs[: len(warm.logprobs)]:
        raise Wrong(f"scenario {scenario.seed}: request {place} differs from what it gets without a cache")
    ends = ((warm.end, count, warm.stop_token), (cold.end, len(cold.tokens), cold.stop_token))
    if warm.end not in (FinishReason.ABORT.name, LEFT) and ends[0] != ends[1]:
        raise Wrong(f"scenario {scenario.seed}: request {place} ends by {ends[0]}, without a cache by {ends[1]}")
