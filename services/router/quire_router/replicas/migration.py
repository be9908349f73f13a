"""Gives every choice an engine, and another one when it loses it: with all its tokens, under a new handle and attempt.

A choice that is better prefilled elsewhere begins as a Handoff, and comes here again when its prompt is computed.

Where no replica can take a choice it waits for one, up to `--migration-wait-s` without an engine since its last token.
A request that costs `--migration-limit` engines in a row without a token is not passed on to yet another
(poison_detection.py).
Knows nothing of streams; what an engine's failure means is in sequences/engine_failure.py, which replica is the best in placement/.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire_common.telemetry import tracing
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.kv_transfer.handoff import Handoff
from quire_router.replicas.fleet import no_replica
from quire_router.sequences.engine_failure import session_lost
from quire_router.sequences.migration_history import Moves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.config import RouterConfig
    from quire_router.kv_transfer.transfers import Transfers
    from quire_router.replicas.chooser import Chooser
    from quire_router.replicas.pending_sequences import PendingSequences
    from quire_router.replicas.replica import Replica
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.handles import HandleCounter
    from quire_router.sequences.sequence_state import Choice

_FIRST_SHUN_S, _MAX_SHUN_S = 0.05, 1.0
log = get_logger(__name__)


class Migration:
    """One per process; all methods run in the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        chooser: Chooser,
        handles: HandleCounter,
        room: PendingSequences,
        transfers: Transfers,
    ) -> None:
        self._wait_s = config.migration_wait_s
        self._limit = config.migration_limit
        self._chooser = chooser
        self._handles = handles
        self._room = room
        self._transfers = transfers
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        self._closed = False

    def start(self, choices: Sequence[Choice]) -> None:
        """Siblings, for the first time: they go together, since they share their prompt's pages."""
        if len(choices) == 1 and _may_part(choices[0]):
            if not self._begin(choices[0]):
                self._wait(choices[0], self._moves_of(choices[0]))
            return
        replica = self._chooser.choose(choices[0], len(choices))
        if replica is not None:
            for choice in choices:
                choice.held_tokens = choices[0].held_tokens
                self._submit(choice, replica)
            return
        for choice in choices:
            self._wait(choice, self._moves_of(choice))

    def lost(self, choice: Choice, loss: EngineFailure) -> None:
        """Its engine works on it no more, and has let go of it."""
        if choice.ended:
            return
        if self._closed:
            choice.fail(session_lost())
            return
        choice.settle()
        if choice.finish:
            self._room.enter(choice)
            return
        moves = self._moves_of(choice)
        moves.progress(len(choice.output_ids), self._wait_s)
        moves.avoid = loss.instance
        if loss.refused and not choice.admitted_once:
            # It had no engine yet: nothing is lost, and who takes it is its first.
            log.debug("sequence refused", **_facts(choice, loss))
        else:
            moves.began()
            moves.reason = loss.reason
            log.warning("sequence lost its engine", emitted=len(choice.output_ids) // 4, **_facts(choice, loss))
        if self._gives_up(choice, moves, loss):
            return
        self._shun(moves, loss)
        instance = choice.kv_route.take_over() if choice.kv_route is not None else ""
        if instance and moves.lost_ns:
            _tell(choice, moves, instance)
        if not instance:
            self._place_or_wait(choice)

    def prefilled(self, choice: Choice) -> None:
        choice.settle()
        if choice.finish:
            self._room.enter(choice)
        elif choice.kv_route is None or not choice.kv_route.take_over():
            self._place_or_wait(choice)

    def place_lost(self, choice: Choice, loss: EngineFailure) -> None:
        moves = self._moves_of(choice)
        moves.avoid = loss.instance
        log.info("decode side lost ahead of the first token", **_facts(choice, loss))
        if not choice.ended and not self._gives_up(choice, moves, loss):
            self._shun(moves, loss)

    def changed(self) -> None:
        """A replica may have become able to take what waits."""
        if self._room.waiting:
            self._serve()

    def close(self) -> None:
        """From now on nothing is moved; what waits fails."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for choice in list(self._room.waiting.values()):
            self._room.leave(choice)
            choice.fail(session_lost())

    def _gives_up(self, choice: Choice, moves: Moves, loss: EngineFailure) -> bool:
        epoch = self._chooser.epoch_of(loss.instance)
        error = moves.poison.verdict(choice, loss, epoch, self._chooser.goes_on, self._limit)
        if error is not None:
            choice.fail(error)
            return True
        if loss.busy and not choice.admitted_once:
            # Overload is told early; only what has begun is worth waiting for.
            moves.busy.add(loss.instance)
            if all(replica.instance in moves.busy for replica in self._chooser.accepting(choice)):
                choice.fail(loss.error)
                return True
        return False

    def _shun(self, moves: Moves, loss: EngineFailure) -> None:
        if loss.refused:
            moves.refusals += 1
            now_s = asyncio.get_running_loop().time()
            moves.shunned[loss.instance] = now_s + min(_MAX_SHUN_S, _FIRST_SHUN_S * 2 ** min(moves.refusals, 8))

    def _begin(self, choice: Choice) -> bool:
        """Submit one that is new, to one replica or to two, if anybody can take it now."""
        sides = self._chooser.choose_sides(choice)
        if sides is None:
            return False
        if sides.prefill is None:
            self._submit(choice, sides.decode)
            return True
        handoff = choice.kv_route = Handoff(choice, sides.prefill.session, self._transfers, self)
        self._submit(choice, sides.prefill)
        handoff.reserve(sides.decode.session, self._handles.take(offsets=choice.wants_logprobs), sides.pulled)
        return True

    def _place_or_wait(self, choice: Choice) -> None:
        moves = self._moves_of(choice)
        if not self._place(choice, moves, asyncio.get_running_loop().time()):
            self._wait(choice, moves)

    def _place(self, choice: Choice, moves: Moves, now_s: float) -> bool:
        """Submit it somewhere, if anybody can take it now."""
        if _may_part(choice):
            return self._begin(choice)
        shunned = [instance for instance, until_s in moves.shunned.items() if until_s > now_s]
        replica = self._chooser.choose(choice, shunned=shunned, avoid=moves.avoid)
        if replica is None:
            return False
        self._submit(choice, replica)
        return True

    def _submit(self, choice: Choice, replica: Replica) -> None:
        moves = choice.moves
        self._room.leave(choice)
        if choice.submitted:
            choice.renew(self._handles.take(offsets=choice.wants_logprobs))
        replica.submit(choice)
        if moves is not None and moves.lost_ns:
            _tell(choice, moves, replica.instance)

    def _wait(self, choice: Choice, moves: Moves) -> None:
        now_s = asyncio.get_running_loop().time()
        moves.until_s = now_s + moves.wait_left_s
        self._room.enter(choice)
        self._wake_at(_next_due_s(moves, now_s))

    def _serve(self) -> None:
        """Look after all that wait: place, give up, or find out when to look again."""
        self._due_s = float("inf")
        now_s = asyncio.get_running_loop().time()
        for choice in list(self._room.waiting.values()):
            moves = self._moves_of(choice)
            moves.wait_left_s = moves.until_s - now_s
            if self._place(choice, moves, now_s):
                continue
            if moves.wait_left_s <= 0:
                self._room.leave(choice)
                choice.fail(no_replica())
                continue
            self._wake_at(_next_due_s(moves, now_s))

    def _wake_at(self, due_s: float) -> None:
        if due_s >= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._serve)

    def _moves_of(self, choice: Choice) -> Moves:
        if choice.moves is None:
            choice.moves = Moves(self._wait_s, len(choice.output_ids))
        return choice.moves


def _may_part(choice: Choice) -> bool:
    """Whether it may be prefilled elsewhere: it is new, alone, and has more than one token to come. What is asked of a
    prompt is said by an engine that computes all of it."""
    sequence = choice.sequence
    left = sequence.stop.max_tokens - len(choice.output_ids) // 4
    alone = choice.job.siblings == 1
    new = not choice.submitted and choice.kv_route is None
    return new and alone and left > 1 and sequence.sampling.prompt_logprobs < 0


def _next_due_s(moves: Moves, now_s: float) -> float:
    return min([moves.until_s, *(due_s for due_s in moves.shunned.values() if due_s > now_s)])


def _facts(choice: Choice, loss: EngineFailure) -> dict[str, str | int]:
    return {
        "request_id": choice.context.request_id,
        "index": choice.index,
        "attempt": choice.attempt,
        "instance": loss.instance,
        "reason": loss.reason,
    }


def _tell(choice: Choice, moves: Moves, instance: str) -> None:
    """Logs, metrics and trace of a choice that has an engine again."""
    us = moves.ended()
    metrics.migrations.labels(moves.reason).inc()
    metrics.migration_wait.observe(us / 1e6)
    fields: dict[str, str | int] = {"attempt": choice.attempt, "instance": instance, "reason": moves.reason}
    log.info(
        "sequence goes on",
        request_id=choice.context.request_id,
        index=choice.index,
        after_ms=us // 1000,
        emitted=len(choice.output_ids) // 4,
        **fields,
    )
    if tracing.enabled():
        context = choice.context
        parent = tracing.extract_headers({"traceparent": context.traceparent, "tracestate": context.tracestate})
        end_ns = time.time_ns()
        attributes = {f"quire.{name}": value for name, value in fields.items()}
        tracing.record_span("router.migrate", parent, end_ns - us * 1000, end_ns, attributes)
