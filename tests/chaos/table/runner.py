"""Runs rows of the table on one stack, a round for each fault: sixteen streams, the fault, what must be true then."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.references import References
from tests.chaos.scripts import make_conversations, with_constraints
from tests.chaos.table.failure_log import FailureLog
from tests.chaos.table.fault_table import Row
from tests.chaos.table.streams import Streams
from tests.chaos.table.table_rig import TableRig

# Bounds of the 99th percentiles: until the routers notice, and until every stream has gone on. The other replica has
# pages for three or four sequences, so most of those that move wait for their turn there.
DETECTED_S, PAUSE_S = 3.0, 10.0
# Conversations of so many users and turns, and the lengths of their answers.
_USERS, _TURNS, _LENGTHS = 9, 3, (12, 30)
_SCRIPTS_SEED = 7
_ROUND_LIMIT_S = 300.0
_WHOLE_AGAIN_S = 20.0


class StackLost(Exception):
    """The stack did not come back after a fault: a new one must go on with the table."""


@dataclass(frozen=True)
class Round:
    """The result of one fault. `target`: what the fault hit; `noticed_s`: until routers had noticed all that was lost;
    `pause_s`: until every stream went on; `back_s`: until no page and no lease was held. `failure`: why the round
    itself could not go on."""

    row: Row
    target: str = ""
    answers: int = 0
    asked_again: int = 0
    errors: Sequence[str] = ()
    wrong: Sequence[str] = ()
    leak: str = ""
    noticed_s: float = 0.0
    pause_s: float = 0.0
    back_s: float = 0.0
    failure: str = ""

    @property
    def bad(self) -> bool:
        """Whether a client saw an error or a wrong answer, or something was kept, or the round failed."""
        return bool(self.errors or self.wrong or self.leak or self.failure)

    def __str__(self) -> str:
        state = "BAD" if self.bad else "ok"
        words = f"{state}: {self.row.name} ({self.target}): {self.answers} answers, {self.asked_again} asked again, "
        words += f"noticed in {self.noticed_s:.2f} s, pause {self.pause_s:.2f} s, all back in {self.back_s:.2f} s"
        return "\n    ".join([words, *self.errors, *self.wrong, *filter(None, (self.leak, self.failure))])


@dataclass
class Runner:
    """`rounds` are those so far; `note` is called after each."""

    rows: Sequence[Row]
    seed: int
    note: Callable[[Sequence[Round]], None]
    references: References = field(default_factory=References)
    rounds: list[Round] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether each row has had its round."""
        return len(self.rounds) == len(self.rows)

    async def run(self, rig: TableRig) -> None:
        """The rounds that are left, in order. What a round does depends on the seed, the row and how often it came
        before: so a part of a run is run again as it was. Raises StackLost."""
        await rig.wait_whole()
        if not self.references.scripts:
            scripts = with_constraints(make_conversations(_USERS, _TURNS, _SCRIPTS_SEED, *_LENGTHS))
            await self.references.learn_through(rig.envoy.grpc, rig.envoy.url, scripts)
        while not self.ended:
            row = self.rows[len(self.rounds)]
            before = sum(one.row == row for one in self.rounds)
            one = await self._try(rig, row, f"{self.seed} {row.name} {before}")
            self.rounds.append(one)
            print(f"{time.strftime('%H:%M:%S')}, {len(self.rounds)} of {len(self.rows)}, {one}", flush=True)
            self.note(self.rounds)
            if one.leak or one.failure:
                await _wait_whole_again(rig)

    async def _try(self, rig: TableRig, row: Row, seed: str) -> Round:
        """A round, whatever becomes of it."""
        try:
            async with asyncio.timeout(_ROUND_LIMIT_S):
                return await self._round(rig, row, seed)
        except Exception as error:  # the judge goes on, and tells of it at the end
            where = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"the round failed: {type(error).__name__} at {where.name}, line {where.lineno}: {error}"
            return Round(row, failure=failure)

    async def _round(self, rig: TableRig, row: Row, seed: str) -> Round:
        rng, leak, back_s = random.Random(seed), "", 0.0
        await rig.wait_whole()
        failures = FailureLog(rig.router_logs, time.time() - time.monotonic())
        async with Streams(rig, self.references, seed, routers_end=row.routers_end) as streams:
            await streams.wait_for_answers()
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            moment = time.monotonic()
            async with row.event.at(rig, rng) as target:
                await asyncio.sleep(rng.uniform(*row.seconds))
        try:
            await rig.wait_whole()
            back_s = await rig.back_s()
        except AssertionError as error:
            leak = f"kept: {error}"
        pause_s = streams.longest_pause_s(moment)
        noticed_s = failures.last_s(moment, pause_s)
        result = (streams.answers, streams.asked_again, streams.errors, streams.wrong)
        return Round(row, target, *result, leak, pause_s if noticed_s is None else noticed_s, pause_s, back_s)


async def _wait_whole_again(rig: TableRig) -> None:
    try:
        await rig.wait_whole(_WHOLE_AGAIN_S)
    except AssertionError as error:
        raise StackLost(str(error)) from error


def select_rows(rows: Sequence[Row], seed: int, faults: int = 0) -> list[Row]:
    """Rows as often as each says, in an order of the seed. `faults`: so many of them, or 0 for all; rows come once
    before any comes twice."""
    rng = random.Random(seed)
    every = [(turn, rng.random(), row) for row in rows for turn in range(row.times)]
    some = [row for _, _, row in sorted(every, key=lambda one: one[:2])][: faults or None]
    rng.shuffle(some)
    return some


def detection_p99(rounds: Sequence[Round]) -> float:
    """The 99th percentile of the time until a fault was noticed, of those faults that somebody must notice."""
    return _p99([one.noticed_s for one in rounds if one.row.detected])


def pause_p99(rounds: Sequence[Round]) -> float:
    """The 99th percentile of how long streams paused."""
    return _p99([one.pause_s for one in rounds])


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))] if seconds else 0.0


def assert_survived(rounds: Sequence[Round]) -> None:
    """No error, no wrong answer, nothing kept; faults were noticed and streams went on in time."""
    bad = [one for one in rounds if one.bad]
    assert not bad, f"{len(bad)} of {len(rounds)}:\n" + "\n".join(map(str, bad))
    late = "\n".join(str(one) for one in rounds if one.noticed_s > DETECTED_S or one.pause_s > PAUSE_S)
    assert detection_p99(rounds) <= DETECTED_S, late
    assert pause_p99(rounds) <= PAUSE_S, late
