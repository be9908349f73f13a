"""CallGate: a refused call raises the refusal of its one check."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire_common.errors import Unauthenticated
from quire_common.telemetry.interceptors import CallGate

DETAILS: Any = SimpleNamespace(method="/a.B/C", invocation_metadata=(("key", "bad"), ("blob-bin", b"\x00")))


async def test_a_refused_call_is_checked_once() -> None:
    gate, checked = CallGate(), list[tuple[str, Mapping[str, str]]]()

    def check(path: str, metadata: Mapping[str, str]) -> None:
        checked.append((path, metadata))
        raise Unauthenticated("INVALID_API_KEY", "The key is not known.", "Check it.")

    async def own_handler(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    gate.guard(check)
    handler: Any = await gate.intercept_service(own_handler, DETAILS)
    with pytest.raises(Unauthenticated, match="not known"):
        await handler.stream_stream(None, None)
    assert checked == [("/a.B/C", {"key": "bad"})]
