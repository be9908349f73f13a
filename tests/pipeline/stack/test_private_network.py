"""A stack whose members each have a network namespace of their own: fake services, real processes, real addresses."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from quire.errors import FailedPrecondition
from quire.local.private_network import PrivateNetwork
from quire.local.stack import LocalStack
from tests.pipeline.leftovers import assert_nothing_left, listening_ports, read_state
from tests.pipeline.stack.stacks import fake_spec

LIMIT_S = 60.0


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_members_keep_their_own_addresses_over_a_restart() -> None:
    before, spec = interfaces(), fake_spec(replicas=0, prefill=1, decode=1)
    try:
        network = PrivateNetwork(spec.members)
    except FailedPrecondition as error:
        pytest.skip(error.message)
    with network:
        stack = LocalStack(spec.in_network(network))
        try:
            assert stack.ready.http.startswith(f"http://{network.hosts['router']}:")
            state = read_state()
            # What listens there does not listen here.
            assert not {service.port for service in state.services.values()} & listening_ports()
            namespaces = {Path(f"/proc/{each.pid}/ns/net").readlink() for each in state.services.values()}
            assert len(namespaces) == len(spec.members)
            worker = state.services["worker-decode-1"]
            assert worker.process.signal(signal.SIGKILL)
            deadline = time.monotonic() + LIMIT_S
            while (now := read_state().services["worker-decode-1"]).process == worker.process or now.phase != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert now.port == worker.port
        finally:
            stack.close()
    assert_nothing_left(read_state())
    assert interfaces() == before
