"""The fallback policy of transports: the order in which they are tried, pauses, and failures that end a round."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quire_worker.kv_transfer.transports.fallback import PEER_RULES, STORE_RULES, FallbackPolicy, FallbackRules
from quire_worker.kv_transfer.transports.transport import TransportError

UNREACHED = TransportError("no answer", silent=True, unreached=True)
REFUSED = TransportError("refused", unreached=True)
HANGS = TransportError("hangs", silent=True)
BROKEN = TransportError("broken")


@dataclass
class Fake:
    name: str
    fails: TransportError | None = None


@dataclass
class Rig:
    rules: FallbackRules
    now_s: float = 0.0
    fakes: list[Fake] = field(default_factory=lambda: [Fake("tcp"), Fake("grpc")])

    def __post_init__(self) -> None:
        self.policy = FallbackPolicy(self.rules, lambda: self.now_s)

    def tried(self, route: str = "here") -> list[str]:
        """What was tried, in order."""
        names = list[str]()

        def attempt(fake: Fake) -> None:
            names.append(fake.name)
            if fake.fails:
                raise fake.fails

        self.policy.try_in_turn(self.fakes, route, attempt)
        return names


def test_a_transport_that_reaches_no_peer_is_tried_last_for_a_while() -> None:
    rig = Rig(PEER_RULES)
    rig.fakes[0].fails = UNREACHED
    assert rig.tried() == ["tcp", "grpc"]
    assert rig.tried() == ["grpc"]
    assert rig.tried("there") == ["tcp", "grpc"], "another peer may be reached"
    rig.now_s = PEER_RULES.first_pause_s
    assert rig.tried() == ["tcp", "grpc"]
    rig.fakes[1].fails = BROKEN
    assert rig.tried() == ["grpc", "tcp"]


@pytest.mark.parametrize("error", [REFUSED, BROKEN])
def test_a_peer_that_refuses_or_breaks_off_pauses_no_transport(error: TransportError) -> None:
    rig = Rig(PEER_RULES)
    rig.fakes[0].fails = error
    assert rig.tried() == ["tcp", "grpc"]
    assert rig.tried() == ["tcp", "grpc"]


def test_a_peer_that_hangs_is_asked_by_no_other_transport() -> None:
    rig = Rig(PEER_RULES)
    rig.fakes[0].fails = HANGS
    assert rig.tried() == ["tcp"]
    assert rig.tried() == ["tcp"]


@pytest.mark.parametrize("error", [UNREACHED, REFUSED, HANGS, BROKEN])
def test_every_failure_of_a_store_pauses_its_transport(error: TransportError) -> None:
    rig = Rig(STORE_RULES)
    rig.fakes[0].fails = error
    assert rig.tried() == ["tcp", "grpc"]
    assert rig.tried() == ["grpc"]


def test_what_worked_is_paused_no_longer() -> None:
    rig = Rig(PEER_RULES)
    rig.fakes[0].fails = UNREACHED
    rig.tried()
    rig.fakes[0].fails, rig.fakes[1].fails = None, BROKEN
    assert rig.tried() == ["grpc", "tcp"]
    assert rig.tried() == ["tcp"]


def test_pauses_are_bounded_in_number() -> None:
    rig = Rig(PEER_RULES)
    rig.fakes[0].fails = UNREACHED
    for number in range(1025):
        rig.tried(str(number))
    assert rig.tried("1024") == ["grpc"]
    assert rig.tried("0") == ["tcp", "grpc"], "the oldest was forgotten"
