"""References: what each script is answered while nothing disturbs the stack, over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import httpx

from quire import AsyncClient
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.answer import Answer, Ticks, over_grpc, over_http
from tests.chaos.scripts import Script, with_stop

# The transports: odd streams speak gRPC, even ones HTTP.
HTTP, GRPC = 0, 1


class References:
    """Every third script gets a stop string out of its own answer."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self._expected: dict[tuple[Script, int], Answer] = {}

    async def learn(self, scripts: Sequence[Script], client: AsyncClient, http: httpx.AsyncClient, engine: str) -> None:
        """Ask each script over each transport. A paced `engine` must answer what its rule says."""
        plain = [script for script in scripts if script.number % 3 != 2]
        free = [script for script in scripts if script.number % 3 == 2]

        async def ask_all(wanted: Sequence[Script], transport: int) -> dict[tuple[Script, int], Answer]:
            asked = (ask(client, http, script, transport, Ticks()) for script in wanted)
            answers = dict(zip(((s, transport) for s in wanted), await asyncio.gather(*asked), strict=True))
            if engine.startswith("paced"):
                _check_paced(answers)
            assert all(answer.complete for answer in answers.values())
            for (script, _), answer in answers.items():
                _check_constraint(script, answer)
            return answers

        longer = await ask_all(free, GRPC)
        cut = [with_stop(script, longer[script, GRPC].texts[0]) for script in free]
        self.scripts = [*plain, *cut]
        for transport in (HTTP, GRPC):
            self._expected |= await ask_all(self.scripts, transport)
        assert any("stop" in self._expected[script, GRPC].finishes.values() for script in cut)

    async def learn_through(self, grpc: str, http: str, scripts: Sequence[Script]) -> None:
        """Learn of a CPU stack at these addresses."""
        async with AsyncClient(grpc) as client, httpx.AsyncClient(base_url=http, trust_env=False, timeout=60) as web:
            await self.learn(scripts, client, web, "cpu")

    def difference(self, script: Script, transport: int, answer: Answer) -> str:
        """Empty where the answer is the undisturbed one; else where they part."""
        return answer.difference(self._expected[script, transport])


async def ask(
    client: AsyncClient, http: httpx.AsyncClient, script: Script, transport: int, ticks: Ticks, leave_after: int = -1
) -> Answer:
    """Ask one script over a transport; leave after so many tokens, unless that is below 0."""
    if transport == GRPC:
        return await over_grpc(client, script, ticks, leave_after)
    return await over_http(http, script, ticks, leave_after)


def _check_constraint(script: Script, answer: Answer) -> None:
    """A whole answer matches the script's constraint."""
    for index, text in answer.texts.items():
        whole = answer.finishes[index] == "stop" and not script.stop
        assert not (script.regex and whole) or re.fullmatch(script.regex, text), (script, text)


def _check_paced(answers: Mapping[tuple[Script, int], Answer]) -> None:
    """Compare with answers that are computed without asking the paced worker, for scripts without a constraint."""
    facts = read_facts(str(find_model(None)))
    for (script, _), answer in answers.items():
        if script.regex:
            continue
        for index, tokens in answer.tokens.items():
            sampling = Sampling(temperature=script.temperature, seed=script.seed, sample=index)
            pure = paced_tokens(answer.prompt_tokens, Stop(script.max_tokens), sampling, facts=facts)
            assert tokens == pure.tokens[: len(tokens)], script
            assert script.stop or tokens == pure.tokens, script
