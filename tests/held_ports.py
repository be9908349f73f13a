"""Ports for the services that a test starts. They are held until the process of the tests ends: the kernel gives them
to no other process that asks for any free port, and so no service finds its port taken."""

from __future__ import annotations

from quire.local.ports import HeldPorts

_held = HeldPorts()


def held_ports(count: int) -> list[int]:
    """Distinct ports of 127.0.0.1."""
    return [_held.choose("127.0.0.1") for _ in range(count)]
