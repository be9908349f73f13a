"""A prefill side and a decode side, and what lies between them: a network of fake workers and the router's errands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire_common.credit import MoveKind, PageMove, Start
from quire_common.finish import FinishReason
from quire_common.sequence import Sequence
from quire_common.ticket import KvTransfer, Ticket
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.request import State
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, with_address

PREFILL = KvTransfer(prefill_only=True)
DECODE = KvTransfer(await_handover=True)


def split_sides(
    config: SchedulerConfig | None = None,
    *,
    store: dict[bytes, list[int]] | None = None,
    hosts: tuple[bytes, bytes] = (b"", b""),
    **sizes: Any,
) -> tuple[Rig, Rig]:
    """Two replicas whose workers find each other, with pages of four tokens if nothing else is said; with a `store`
    they share it."""
    peers: dict[bytes, FakeWorker] = {}
    rigs = []
    for name, host in zip((b"prefill", b"decode"), hosts, strict=True):
        hello = replace(with_address(make_hello(**{"page_size": 4, **sizes}), name), host=host)
        worker = FakeWorker(hello, peers=peers, store=store)
        rigs.append(Rig(config, kvstore=store is not None, worker=worker))
    return rigs[0], rigs[1]


def other_ids(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 90, tokens)


def pulls(rig: Rig) -> list[PageMove]:
    return [move for grant in rig.worker.seen for move in grant.move if move.kind is MoveKind.PULL]


def starts(rig: Rig) -> list[Start]:
    return [start for grant in rig.worker.seen for start in grant.start]


def state_of(rig: Rig, handle: int = 1) -> State:
    return rig.core._replica.requests[0, handle].state


def prefilled(prefill: Rig, tokens: int = 14, handle: int = 1) -> tuple[Ticket, int]:
    """A ticket of pages that are all there, and the token."""
    prefill.submit(handle, a_sequence(tokens, 8), transfer=PREFILL)
    prefill.step_until(lambda: (0, handle) in prefill.prefilled)
    return prefill.tickets[0, handle], prefill.tokens[0, handle][0]


class Split:
    """The router: hands tickets and tokens on as they come, and releases what was pulled. Handles are of session 0."""

    def __init__(self, prefill: Rig, decode: Rig) -> None:
        self.prefill, self.decode = prefill, decode
        self._asked: list[int] = []
        self._ticketed: set[int] = set()
        self._done: set[int] = set()

    def ask(self, handle: int, sequence: Sequence, **context: Any) -> None:
        self.prefill.submit(handle, sequence, transfer=PREFILL, **context)
        self.decode.submit(handle, sequence, transfer=DECODE, **context)
        self._asked.append(handle)

    def step(self) -> None:
        now = max(self.prefill.now, self.decode.now)
        for rig in (self.prefill, self.decode):
            rig.now = now
            rig.step()
            rig.core.check_integrity()
        for handle in self._asked:
            self._errands(handle)

    def until(self, *ended: int, most: int = 2_000) -> None:
        for _ in range(most):
            if all((0, handle) in self.ends or (0, handle) in self.decode.errors for handle in ended):
                return
            self.step()
        raise AssertionError(f"stuck: {self.prefill.core.load()}, {self.decode.core.load()}")

    def run(self) -> None:
        """All that was asked for, until nothing is left on either side."""
        self.until(*self._asked)
        for _ in range(30):
            self.step()
        self.prefill.run()
        self.decode.run()

    def tokens(self, handle: int) -> list[int]:
        return self.prefill.tokens[0, handle] + self.decode.tokens[0, handle]

    @property
    def ends(self) -> dict[tuple[int, int], FinishReason]:
        return self.prefill.ends | self.decode.ends

    def _errands(self, handle: int) -> None:
        key = (0, handle)
        ticket = self.prefill.tickets.get(key)
        if ticket is not None and handle not in self._ticketed:
            self._ticketed.add(handle)
            self.decode.hand_over(handle, ticket=ticket)
        if ticket is not None and key in self.decode.pulled:
            self.prefill.core.release([ticket.transfer_id])
        if handle in self._done:
            return
        if key in self.prefill.prefilled:
            self._done.add(handle)
            self.decode.hand_over(handle, *self.prefill.tokens[key], give_up=ticket is None)
        elif key in self.prefill.ends:
            self._done.add(handle)
            self.decode.core.abort(0, handle, self.decode.now)
        elif key in self.prefill.errors:
            self._done.add(handle)
            self.decode.hand_over(handle, give_up=True)
