"""Specs of stacks made of fake services, and what must be true when one has ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from quire.local.pids import MARK_VARIABLE
from quire.local.spec import SERVICES, StackSpec

FAKE = str(Path(__file__).parents[1] / "fakes" / "fake_service.py")


def fake_spec(*, switches: Mapping[str, tuple[str, ...]] | None = None, **fields: object) -> StackSpec:
    commands = {service: (sys.executable, FAKE, service, *(switches or {}).get(service, ())) for service in SERVICES}
    options: dict[str, Any] = {"name": "test", "drain_timeout_s": 20.0, **fields}
    return StackSpec(model="a-model", commands=commands, **options)


def processes_of(stack_id: str) -> list[psutil.Process]:
    """Every process that carries the stack's mark, found without the package's own code."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE) == stack_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
