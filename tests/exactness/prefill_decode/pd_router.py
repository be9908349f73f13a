"""The router of prefill and decode sides in virtual time, as plain as can be: what each request is at, what each side
is told, and what clients hear. Sides are lost, leases forgotten, clients leave: tokens must be those of an undisturbed
run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import QuireError
from quire_common.finish import FinishReason
from quire_common.sequence import RequestContext
from quire_common.ticket import KvTransfer
from quire_scheduler.disaggregation.handover import Handover
from tests.exactness.clients import LOST, Heard
from tests.exactness.virtual.virtual_time import DelayLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.sequence import Sequence
    from quire_common.ticket import Ticket
    from quire_scheduler.core.outputs import SessionOutputs
    from tests.exactness.prefill_decode.pd_scenario import PdScenario
    from tests.exactness.prefill_decode.pd_side import Side
    from tests.exactness.virtual.virtual_time import VirtualTime

_SESSION = 1


@dataclass
class _Place:
    """A handle of one request at a side, submitted with so many `known` tokens. `waits`: for a handover."""

    side: Side
    handle: int
    known: int
    waits: bool = False


@dataclass
class _Flow:
    """One request. `prefill` and `decode`: where it is; both, while it is prefilled at one for the other."""

    number: int
    sequence: Sequence
    heard: Heard = field(default_factory=Heard)
    attempt: int = 0
    prefill: _Place | None = None
    decode: _Place | None = None
    ticket: Ticket | None = None
    source: Side | None = None
    renews: bool = True

    def known(self) -> Sequence:
        """With all that its client has heard."""
        tokens = np.array(self.heard.tokens, np.int32)
        return replace(self.sequence, output_ids=np.concatenate([self.sequence.output_ids, tokens]))


class PdRouter:
    """`prefill` and `decode` are set before the first `ask`."""

    def __init__(self, scenario: PdScenario, time: VirtualTime, rng: np.random.Generator) -> None:
        self.heard: dict[int, Heard] = {}
        self.prefill: tuple[Side, ...] = ()
        self.decode: tuple[Side, ...] = ()
        self._scenario = scenario
        self._time = time
        self._rng = rng
        self._flows: dict[tuple[str, int], _Flow] = {}
        self._lines: dict[str, DelayLine[Callable[[], object]]] = {}
        self._next_handle = 1

    def ask(self, number: int, sequence: Sequence) -> None:
        """A request comes."""
        flow = _Flow(number, sequence, renews=bool(self._rng.random() >= self._scenario.forget))
        self.heard[number] = flow.heard
        left = sequence.stop.max_tokens - len(sequence.output_ids)
        if left < 2 or self._rng.random() < self._scenario.whole:
            self._resume(flow)
        else:
            flow.prefill = self._submit(flow, self._choose(self.prefill), KvTransfer(prefill_only=True))
            self._reserve(flow)
        abort_us = self._scenario.asks[number].abort_us
        if abort_us is not None:
            self._time.after(abort_us, lambda: self._leave(flow))

    def hear(self, side: Side, outputs: list[SessionOutputs]) -> None:
        """What a side says, in the order of its message."""
        for out in outputs:
            for admitted in out.admitted:
                if (flow := self._flows.get((side.name, admitted.handle))) and admitted.ticket is not None:
                    self._ticket(flow, side, admitted.ticket)
            self._rows(side, out)
            for note in out.finished:
                if flow := self._flows.get((side.name, note.handle)):
                    flow.heard.prompt_tokens, flow.heard.completion_tokens = note.prompt_tokens, note.completion_tokens
                    flow.heard.stop_token = note.stop_token_id
                    self._end(flow, flow.heard.end)
            for prefilled in out.prefilled:
                if flow := self._flows.pop((side.name, prefilled.handle), None):
                    side.peers.events["prefilled for others"] += 1
                    self._take_over(flow, whole=True)
            for pulled in out.pulled:
                if flow := self._flows.get((side.name, pulled.handle)):
                    side.peers.events["pulled in part"] += pulled.pages < pulled.wanted
                    side.peers.events["pulled whole"] += pulled.pages == pulled.wanted > 0
                    self._let_go(flow)
            for failed in out.failed:
                if flow := self._flows.pop((side.name, failed.handle), None):
                    self._failed(flow, failed.handle, failed.error)

    def _rows(self, side: Side, out: SessionOutputs) -> None:
        at, owner = 0, out.handle.repeat(out.count)
        for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
            if flow := self._flows.get((side.name, handle)):
                assert not flow.heard.end, f"request {flow.number}: a row after the end"
                assert flow.decode is None or not flow.decode.waits or flow.prefill is not None, "a row of who waits"
                flow.heard.tokens += out.token[at : at + count].tolist()
                flow.heard.end = FinishReason(finish).name if finish else ""
            at += count
        if out.logprobs is not None:
            for index, value in zip(out.logprobs.token_index.tolist(), out.logprobs.logprob.tolist(), strict=True):
                if flow := self._flows.get((side.name, int(owner[index]))):
                    flow.heard.logprobs.append(value)

    def _ticket(self, flow: _Flow, side: Side, ticket: Ticket) -> None:
        """The prefill side has begun."""
        flow.ticket, flow.source = ticket, side
        if flow.decode is not None and flow.decode.waits:
            self._hand_over(flow.decode, Handover(ticket=ticket))
        self._renew(flow, ticket)

    def _take_over(self, flow: _Flow, *, whole: bool) -> None:
        """The decode side goes on from here. `whole`: the prefill side has done all of its part."""
        flow.prefill = None
        if flow.decode is None:
            self._resume(flow)
            return
        flow.decode.waits = False
        drawn = tuple(flow.heard.tokens[flow.decode.known :])
        self._hand_over(flow.decode, Handover(tokens=drawn, give_up=not whole or flow.ticket is None or not drawn))

    def _failed(self, flow: _Flow, handle: int, error: QuireError) -> None:
        if error.code != LOST:
            flow.heard.end = error.code
            self._end(flow, error.code)
        elif flow.prefill is not None and flow.prefill.handle == handle:
            self._let_go(flow)
            self._take_over(flow, whole=False)
        elif flow.prefill is not None:
            self._reserve(flow)
            if flow.ticket is not None and flow.decode is not None:
                self._hand_over(flow.decode, Handover(ticket=flow.ticket))
        else:
            self._resume(flow)

    def _reserve(self, flow: _Flow) -> None:
        flow.decode = self._submit(flow, self._choose(self.decode), KvTransfer(await_handover=True))
        flow.decode.waits = True

    def _resume(self, flow: _Flow) -> None:
        """Go on anywhere, from all that was heard, with the pages of the ticket where it is still good."""
        side = self._choose((*self.prefill, *self.decode))
        ticket = flow.ticket if side is not flow.source else None
        flow.decode = self._submit(flow, side, KvTransfer(ticket=ticket))
        if ticket is None:
            self._let_go(flow)

    def _submit(self, flow: _Flow, side: Side, transfer: KvTransfer) -> _Place:
        place = _Place(side, self._next_handle, len(flow.heard.tokens))
        self._next_handle += 1
        self._flows[side.name, place.handle] = flow
        context = RequestContext(f"r{flow.number}", flow.attempt)
        flow.attempt += 1
        known = flow.known()

        def submit() -> None:
            try:
                side.core.submit(_SESSION, place.handle, context, known, self._time.now_s, transfer)
            except QuireError as error:
                raise AssertionError(f"request {flow.number} is refused: {error}") from error

        self._tell(side, submit)
        return place

    def _hand_over(self, place: _Place, handover: Handover) -> None:
        side, handle = place.side, place.handle
        self._tell(side, lambda: side.core.hand_over(_SESSION, handle, handover, self._time.now_s))

    def _renew(self, flow: _Flow, ticket: Ticket) -> None:
        """While somebody waits to pull."""

        def again() -> None:
            if flow.ticket is ticket and flow.renews and flow.source is not None:
                source = flow.source
                self._tell(source, lambda: source.core.renew([ticket.transfer_id], self._time.now_s))
                self._renew(flow, ticket)

        self._time.after(self._scenario.lease_us // 3, again)

    def _let_go(self, flow: _Flow) -> None:
        """Nobody pulls with this ticket any more."""
        ticket, source = flow.ticket, flow.source
        flow.ticket = flow.source = None
        if ticket is not None and source is not None:
            self._tell(source, lambda: source.core.release([ticket.transfer_id]))

    def _leave(self, flow: _Flow) -> None:
        """Its client does not wait any more."""
        if not flow.heard.end:
            self._end(flow, FinishReason.ABORT.name)

    def _end(self, flow: _Flow, end: str) -> None:
        flow.heard.end = end
        self._let_go(flow)
        for name, handle in [key for key, other in self._flows.items() if other is flow]:
            del self._flows[name, handle]
            side = next(each for each in (*self.prefill, *self.decode) if each.name == name)
            self._abort(side, handle)

    def _abort(self, side: Side, handle: int) -> None:
        self._tell(side, lambda: side.core.abort(_SESSION, handle, self._time.now_s))

    def _tell(self, side: Side, what: Callable[[], object]) -> None:
        """In order, a while later."""

        def deliver(words: Callable[[], object]) -> None:
            words()
            side.changed()

        if side.name not in self._lines:
            self._lines[side.name] = DelayLine(self._time, self._rng, side.weather.router_us, deliver)
        self._lines[side.name].send(what)

    def _choose(self, sides: tuple[Side, ...]) -> Side:
        return sides[int(self._rng.integers(len(sides)))]
