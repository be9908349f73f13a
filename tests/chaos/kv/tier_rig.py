"""TierRig: a stack whose prompts' pages soon leave the device and memory, so that faults of the tiers below are met.

Pages of the paced worker hold what tokens depend on: one wrong byte, and the answer is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import grpc

from quire import AsyncClient
from quire.models import find_model
from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from quire_common.sequence import Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.answer import Ticks, over_grpc
from tests.chaos.rig import LIMIT_S, POLL_S, Rig
from tests.chaos.scripts import LINES, Script

# The least that the kvstore takes: some sixty pages of the paced worker.
SMALL_RAM = str(1 << 16)
_TOKENS = 12


def prompts(name: str, count: int = 8) -> list[str]:
    """Some twenty pages each, which differ from the first token on."""
    return [
        f"{name} {number}.\n" + "".join(LINES[(number + i) % len(LINES)] for i in range(12)) for number in range(count)
    ]


class TierRig(Rig):
    """Nothing is kept on the device; `kvstore` are the kvstore's flags, `shared` those of kvstore and worker."""

    def __init__(
        self,
        kvstore: Mapping[str, str],
        *,
        model: str = "",
        keys: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
    ) -> None:
        # What is written and found is the subject here, not how long one waits for it.
        patient = {"prefetch-ms": "20000", "ram-bytes": SMALL_RAM, "disk-retry-s": "0.1", "redis-retry-s": "0.1"}
        super().__init__(
            "paced 1",
            replicas=1,
            tokenizers=1,
            model=model,
            api_keys=keys,
            flags={
                "kvstore": {"disk-bytes": "0", "disk-keep-free-bytes": "0", **patient, **kvstore, **(shared or {})},
                "worker": {**(shared or {})},
                "scheduler": {"enable-prefix-caching": False, "kvstore-timeout-ms": "20000"},
            },
        )
        self._model = model or str(find_model(None))
        self._first_key = keys[0] if keys else ""

    async def __aenter__(self) -> Self:
        """A worker that started before the kvstore stores nothing for a second, so the rig first asks until it does."""
        try:
            await self.ask_until(prompts("WARM UP", 1), "ram", lambda ram: ram.stored, self._first_key)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def ask(self, asked: Sequence[str], key: str = "") -> None:
        """Every answer must be the undisturbed one; then nothing may be held by anybody."""
        facts = read_facts(self._model)
        async with AsyncClient(self.stack.grpc, api_key=key or None) as client:
            scripts = [Script(number, prompt, _TOKENS, 0.0, 0) for number, prompt in enumerate(asked)]
            answers = await asyncio.gather(*(over_grpc(client, script, Ticks()) for script in scripts))
        for script, answer in zip(scripts, answers, strict=True):
            assert answer.complete
            assert answer.tokens[0] == paced_tokens(answer.prompt_tokens, Stop(_TOKENS), facts=facts).tokens, (
                script.prompt
            )
        await asyncio.to_thread(self.wait_pages_back)
        await self.until(lambda stats: not stats.leases and not stats.pending_puts)

    async def ask_until(
        self, asked: Sequence[str], medium: str, condition: Callable[[Any], bool], key: str = ""
    ) -> Any:
        """Ask over and over until a tier's statistics are so: who calls the kvstore may be waiting before it tries one
        again that did not answer."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            await self.ask(asked, key)
            found = await self.until_tier(medium, lambda _: True)
            if condition(found):
                return found
            assert time.monotonic() < deadline, f"not so after {LIMIT_S} s: {found}"

    async def until(self, condition: Callable[[Any], bool], limit_s: float = LIMIT_S) -> Any:
        """The kvstore's statistics, once they are so."""
        deadline, stats = time.monotonic() + limit_s, None
        while True:
            with contextlib.suppress(grpc.RpcError):  # it may be starting again
                stats = await asyncio.to_thread(self._stats)
                if condition(stats):
                    return stats
            assert time.monotonic() < deadline, f"not so after {limit_s} s: {stats}"
            await asyncio.sleep(POLL_S)

    async def until_tier(self, medium: str, condition: Callable[[Any], bool]) -> Any:
        """One tier's statistics, once they are so."""
        return tier(await self.until(lambda stats: condition(tier(stats, medium))), medium)

    async def lose_memory(self) -> None:
        """The kvstore is killed, and another one takes its place."""
        before = self.service("kvstore")
        assert before.process.signal(signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while self.service("kvstore").pid == before.pid or not self.serves("kvstore"):
            assert time.monotonic() < deadline
            await asyncio.sleep(POLL_S)

    def _stats(self) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{self.service('kvstore').port}") as channel:
            return kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.StatsRequest(), timeout=5)


def tier(stats: Any, medium: str) -> Any:
    """One tier's."""
    return next(tier for tier in stats.tiers if tier.medium == medium)
