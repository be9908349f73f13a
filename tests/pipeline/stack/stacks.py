"""Specs of stacks made of fake services."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.local.spec import SERVICES, StackSpec, service_of

FAKE = str(Path(__file__).parents[2] / "fakes" / "fake_service.py")


def fake_spec(*, switches: Mapping[str, tuple[str, ...]] | None = None, **fields: object) -> StackSpec:
    """`switches` by service or member."""
    commands = {
        name: (sys.executable, FAKE, service_of(name), *(switches or {}).get(name, ()))
        for name in (*SERVICES, *(switches or {}))
    }
    options: dict[str, Any] = {"name": "test", "drain_timeout_s": 20.0, **fields}
    return StackSpec(model="a-model", commands=commands, **options)
