"""The kvstore is killed while pages of a load are on their way to a worker, by each transport.

The worker's ring has one slot for loads, and its engine runs for a moment at a time: so a load takes many of these, and
the kill comes between two. The answer's usage tells how many pages had come.
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request

import pytest

from quire import AsyncClient, SamplingParams
from tests.chaos.kv.kv_rig import Flags, kv_stats, tier, until
from tests.chaos.kv.test_kv_faults import free_port
from tests.chaos.rig import LIMIT_S, POLL_S, Rig
from tests.chaos.scripts import LINES

_PAGE = 16
_PAGE_BYTES = 131_072
# More than sockets and streams hold under way.
_PROMPT = "THE PROLOGUE.\n" + "".join(LINES) * 12
_GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# The load may not have begun, or have ended, when the kvstore dies.
_TRIES = 10
_MOMENT_S = 0.001


class GetRig(Rig):
    """One worker that keeps nothing, and takes pages from the kvstore one by one."""

    def __init__(self, transport: str) -> None:
        self._metrics = f"127.0.0.1:{free_port()}"
        worker: dict[str, str | bool] = {
            "mover-ring-bytes": str(2 * _PAGE_BYTES),
            "kv-transport": transport,
            "metrics-listen": self._metrics,
        }
        flags: Flags = {
            "worker": worker,
            "kvstore": {"disk-path": ""},
            "scheduler": {"enable-prefix-caching": False, "kvstore-timeout-ms": "2000"},
        }
        super().__init__("cpu", replicas=1, tokenizers=1, flags=flags)
        self.prompt_pages = 0

    async def ask(self) -> tuple[list[int], int]:
        """The tokens, and how many pages were not computed for them."""
        async with AsyncClient(self.stack.grpc) as client:
            answer = await client.complete(_PROMPT, _GREEDY)
        self.prompt_pages = (len(answer.prompt_token_ids) - 1) // _PAGE
        assert answer.num_cached_tokens is not None
        return answer.outputs[0].token_ids, answer.num_cached_tokens // _PAGE

    async def ask_and_kill(self, looks: int) -> tuple[list[int], int]:
        """The kvstore dies when a lease for the pages has been seen so often."""
        (name,) = self.stack.spec.members_of("worker")
        engine, kvstore = self.service(name).process, self.service("kvstore").process
        asking = asyncio.create_task(self.ask())
        while looks and not asking.done():
            assert engine.signal(signal.SIGSTOP)
            try:
                stats = await asyncio.to_thread(kv_stats, self)
                looks -= stats is not None and stats.leases > 0
                if not looks:
                    assert kvstore.signal(signal.SIGKILL)
                    while kvstore.alive():
                        await asyncio.sleep(POLL_S)
            finally:
                engine.signal(signal.SIGCONT)
            await asyncio.sleep(_MOMENT_S)
        return await asking

    async def until_kept(self) -> None:
        """Until the kvstore serves and has the prompt's pages, whoever has to be asked for that."""
        deadline = time.monotonic() + LIMIT_S
        while not await until(self, lambda stats: tier(stats, "ram").pages >= self.prompt_pages, 1.0):
            assert time.monotonic() < deadline, f"nothing is stored: {kv_stats(self)}"
            await self.ask()

    async def assert_at_rest(self) -> None:
        """No page is in use, no lease is out and no put is open."""
        await asyncio.to_thread(self.wait_pages_back)
        assert await until(self, lambda stats: not stats.leases and not stats.pending_puts), f"{kv_stats(self)}"

    def transport(self) -> str:
        """What carried the worker's pages last."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        return next(name for name in ("shm", "tcp", "grpc") if f'kv_transport{{transport="{name}"}} 1.0' in text)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_streams_survive_a_kvstore_killed_during_a_get(transport: str) -> None:
    async with GetRig(transport) as rig:
        tokens, cached = await rig.ask()
        assert cached == 0
        came = 0
        for number in range(_TRIES):
            await rig.until_kept()
            answered, came = await rig.ask_and_kill(6 + 3 * number)
            print(f"{transport}: {came} of {rig.prompt_pages} pages had come")
            assert answered == tokens
            await rig.assert_at_rest()
            if 0 < came < rig.prompt_pages:
                break
        assert 0 < came < rig.prompt_pages, "it never was in the middle"
        await rig.until_kept()
        deadline = time.monotonic() + LIMIT_S
        while came < rig.prompt_pages:
            assert time.monotonic() < deadline, "the worker does not find its way back"
            answered, came = await rig.ask()
            assert answered == tokens
        assert rig.transport() == transport
        await rig.assert_at_rest()
