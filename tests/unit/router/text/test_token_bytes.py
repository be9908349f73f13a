"""TokenBytes: what one call forgets is not lost to another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from quire_router.text import token_bytes
from quire_router.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


class GatedClient:
    """A tokenizer client whose answers with the id 2 wait for the gate. The bytes of an id are its digits."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        if 2 in ids:
            await self.gate.wait()
        return [b"%d" % each for each in ids]


async def test_ids_that_another_call_forgot_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_bytes, "_MAX_ENTRIES", 4)
    client: Any = GatedClient()
    known = TokenBytes(client)
    await known.ensure([1])
    waiting = asyncio.create_task(known.ensure([1, 2]))
    await asyncio.sleep(0)
    await known.ensure([3, 4, 5, 6])
    client.gate.set()
    await waiting
    assert [known.get(each) for each in (1, 2)] == [b"1", b"2"]
