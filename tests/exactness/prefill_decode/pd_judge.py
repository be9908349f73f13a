"""Serves a scenario through prefill and decode sides: every request must be answered as it is alone, to the last token
and logprob, and as by one replica that does both; then nothing may be left on any side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.finish import FinishReason
from tests.exactness.judge import Wrong, compare, undisturbed
from tests.exactness.prefill_decode.pd_router import PdRouter
from tests.exactness.prefill_decode.pd_side import Side
from tests.exactness.virtual.virtual_peers import Peers
from tests.exactness.virtual.virtual_replica import VirtualReplica
from tests.exactness.virtual.virtual_time import VirtualTime

if TYPE_CHECKING:
    from collections.abc import Sequence as ListOf

    from quire_common.sequence import Sequence
    from tests.exactness.clients import Heard
    from tests.exactness.events import Events
    from tests.exactness.prefill_decode.pd_scenario import PdScenario
    from tests.exactness.prefill_decode.pd_subjects import PdSubjects
    from tests.exactness.subject import Subject


def judge_pd(subjects: PdSubjects, scenario: PdScenario) -> Events:
    """Raise Wrong, or tell what happened."""
    wanted = undisturbed(subjects.one, scenario.together)
    sequences = {number: want.sequence for number, want in wanted.items()}
    try:
        together = VirtualReplica(subjects.one, scenario.together, lockstep=False, sequences=sequences).run()
        world = PdWorld(subjects.sides, scenario, sequences)
        heard = world.run()
        for number, want in wanted.items():
            compare(scenario.together, number, together[number], want)
            _compare(number, heard[number], together[number])
    except Exception as error:
        raise Wrong(f"scenario {scenario.seed}: {type(error).__name__}: {error}") from error
    return world.peers.events


class PdWorld:
    """Sides, a router and a network. One use."""

    def __init__(self, subjects: ListOf[Subject], scenario: PdScenario, sequences: dict[int, Sequence]) -> None:
        self.peers = Peers()
        self._time = VirtualTime(most_events=200_000)
        self._scenario = scenario
        self._sequences = sequences
        rng = np.random.default_rng((scenario.seed, 6))
        self._router = PdRouter(scenario, self._time, rng)
        devices = iter(subjects)
        groups = []
        for role, weathers in (("prefill", scenario.prefill), ("decode", scenario.decode)):
            group = [
                Side(f"{role}-{n}", next(devices), scenario, weather, self._time, rng, self.peers, self._router.hear)
                for n, weather in enumerate(weathers)
            ]
            groups.append(tuple(group))
        self._router.prefill, self._router.decode = groups

    def run(self) -> dict[int, Heard]:
        """Serve all, and look whether anything is left."""
        time, scenario, router = self._time, self._scenario, self._router
        for number, sequence in self._sequences.items():
            time.at(scenario.asks[number].at_us, lambda n=number, s=sequence: router.ask(n, s))  # type: ignore[misc]  # the default binds the loop's variables
        for sides, moments in ((router.prefill, scenario.lose_prefill_us), (router.decode, scenario.lose_decode_us)):
            for place, moment in enumerate(moments):
                side = sides[place % len(sides)]
                time.at(moment, lambda side=side: self._lose(side))  # type: ignore[misc]  # the default binds the loop's variable
        time.run()
        # Leases that nobody gives back end by themselves, when somebody looks at the clock.
        for side in (*router.prefill, *router.decode):
            time.after(scenario.lease_us + 1, side.changed)
        time.run()
        stuck = [number for number, heard in router.heard.items() if not heard.end]
        loads = [side.core.load() for side in (*router.prefill, *router.decode)]
        assert not stuck, f"requests {stuck} never ended: {loads}"
        for side in (*router.prefill, *router.decode):
            side.assert_at_rest()
            self.peers.events[f"{side.role} preemptions"] += side.core.stats.preemptions
            for end, count in side.core.stats.transfers.items():
                self.peers.events[f"transfers {end}"] += count
        assert not self.peers.exports, "an export is left"
        self.peers.events["requests"] += len(router.heard)
        self.peers.events["aborted"] += sum(h.end == FinishReason.ABORT.name for h in router.heard.values())
        return router.heard

    def _lose(self, side: Side) -> None:
        self.peers.events[f"{side.role} workers lost"] += 1
        side.lose_worker()


def _compare(number: int, heard: Heard, together: Heard) -> None:
    """With what one replica that does both answers."""
    left, count = heard.end == FinishReason.ABORT.name, len(heard.tokens)
    tokens = together.tokens[:count] if left else together.tokens
    if heard.tokens != tokens:
        at = next((i for i, (a, b) in enumerate(zip(heard.tokens, tokens, strict=False)) if a != b), -1)
        raise Wrong(f"request {number} was answered {heard.tokens}, not {tokens} (first at {at}, end {heard.end})")
    if heard.logprobs != together.logprobs[: len(heard.logprobs)] or (not left and heard.logprobs != together.logprobs):
        raise Wrong(f"request {number} has logprobs {heard.logprobs}, not {together.logprobs}")
    ends = [(one.end, one.stop_token, one.prompt_tokens, one.completion_tokens) for one in (heard, together)]
    if not left and ends[0] != ends[1]:
        raise Wrong(f"request {number} ended by {ends[0]}, not {ends[1]}")
