"""What a stack shows to the world: nothing, unless it was told to."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from quire.local.stack import LocalStack
from tests.pipeline.leftovers import processes_of


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    # gRPC binds 127.0.0.1 as ::ffff:127.0.0.1, which is the same.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def test_every_port_is_on_the_loopback(stack: LocalStack) -> None:
    state = stack.directory.read()
    assert state is not None
    listening = [
        (process.name(), connection.laddr.ip)
        for process in processes_of(state.stack_id)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 6
    assert {name for name, address in listening if not is_loopback(address)} == set()


def test_the_state_directory_is_its_owners_alone(stack: LocalStack) -> None:
    assert stack.directory.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("service", ["router", "tokenizer", "scheduler", "kvstore", "worker"])
def test_processes_are_what_they_are_called(stack: LocalStack, service: str) -> None:
    state = stack.directory.read()
    assert state is not None
    command = psutil.Process(state.services[service].pid).cmdline()
    assert command[1:3] == ["-m", f"quire_{service}"]
