"""Specs of stacks made of fake services."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.local.spec import SERVICES, StackSpec

FAKE = str(Path(__file__).parents[1] / "fakes" / "fake_service.py")


def fake_spec(*, switches: Mapping[str, tuple[str, ...]] | None = None, **fields: object) -> StackSpec:
    commands = {service: (sys.executable, FAKE, service, *(switches or {}).get(service, ())) for service in SERVICES}
    options: dict[str, Any] = {"name": "test", "drain_timeout_s": 20.0, **fields}
    return StackSpec(model="a-model", commands=commands, **options)
