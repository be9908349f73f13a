"""Answers that must match a form are the same when their client is cut off, when what serves them is killed, with
prefill and decode apart, with siblings, and when they are preempted: 50 scenarios of a table, on real services.

QUIRE_DISTURBED (50) is the number of scenarios. QUIRE_DISTURBED_ENGINES (paced 10) names the engines, with commas
between: `paced 10` is a worker without a model, whose steps take 10 ms, `cpu` the demo model.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import orjson
import psutil
import pytest

from quire import AsyncClient, RequestOutput, SamplingParams
from quire.generate_call import GenerateCall
from quire.local.ports import free_ports
from quire.outputs import Delta
from tests.chaos.judge import MOVES
from tests.chaos.prefill_decode.pd_rig import PdRig
from tests.chaos.prefill_decode.pd_rig import flags_of as pd_flags
from tests.chaos.rig import Rig
from tests.chaos.scripts import LINES
from tests.structured.disturbances import CUT, MATCHER, Scenario, make_scenario
from tests.tcp_relay import TcpRelay

pytestmark = pytest.mark.slow

SCENARIOS = int(os.environ.get("QUIRE_DISTURBED", "50"))
ENGINES = os.environ.get("QUIRE_DISTURBED_ENGINES", "paced 10").split(",")
# A request may wait for a killed worker to return.
RECONNECT_S = 120.0
# Few enough that company takes pages from a request with siblings.
PAGES, PAGE_BYTES = 64, 16 * 8 * 1024
# So many of these events must be in fifty scenarios. Fewer scenarios show nothing about an event that they lack.
LEAST = {
    "cut off": 10,
    "killed": 25,
    "resumed by the client": 10,
    "moved": 5,
    "pages pulled": 60,
    "with siblings": 15,
    "preempted": 1,
}


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("QUIRE_WORKER_ATTENTION_BACKEND", "torch")


@dataclass
class Stage:
    """A stack, a client of it that a relay can cut off, and what has happened."""

    rig: Rig
    client: AsyncClient
    relay: TcpRelay
    metrics: Mapping[str, int]
    events: Counter[str] = field(default_factory=Counter)

    async def undisturbed(self, scenario: Scenario) -> Any:
        """Return the answer with nothing beside it."""
        output = await self.client.complete(scenario.prompt, scenario.params, request_id=f"d{scenario.number}")
        _check_form(scenario, output)
        return _shown(output)

    async def disturbed(self, scenario: Scenario, tokens: int) -> Any:
        """Return the answer of a scenario whose undisturbed answer has this number of tokens."""
        await self.rig.wait_whole()
        chance = random.Random(scenario.number)
        company = [asyncio.create_task(self._company(scenario, number)) for number in range(scenario.company)]
        due = [(share * tokens, event) for share, event in scenario.events]
        output, heard = RequestOutput(), 0
        async for delta in self.client.generate(
            scenario.prompt, scenario.params, request_id=f"d{scenario.number}", return_token_ids=True
        ):
            output.add(delta)
            heard += len(delta.token_ids)
            while due and heard >= due[0][0]:
                self._strike(due.pop(0)[1], chance)
        await asyncio.gather(*company)
        self.events["with siblings"] += scenario.n > 1
        self.events["scenarios"] += 1
        return _shown(output)

    def _strike(self, event: str, chance: random.Random) -> None:
        """Cut the client off, or kill a process."""
        if event == CUT:
            self.relay.hang_up(reset=chance.random() < 0.5)
            self.events["cut off"] += 1
            return
        if event == MATCHER:
            struck = [process.pid for process in self._matchers()]
        else:
            struck = [self.rig.service(chance.choice(self.rig.stack.spec.members_of(event))).pid]
        for pid in struck:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.events["killed"] += 1
                self.events[f"killed: {event}"] += 1

    def _matchers(self) -> Iterator[psutil.Process]:
        """Yield the matchers of all workers."""
        for member in self.rig.stack.spec.members_of("worker"):
            with suppress(psutil.Error):  # it has just been killed
                for child in psutil.Process(self.rig.service(member).pid).children():
                    if "quire_worker.matcher" in child.cmdline():
                        yield child

    async def _company(self, scenario: Scenario, number: int) -> None:
        prompt = f"ACT {scenario.number}, {number}.\n{LINES[number % len(LINES)]}"
        params = SamplingParams(max_tokens=100, seed=number, ignore_eos=True)
        # Not through the relay: a request that has not begun is not resumed.
        async with AsyncClient(self.rig.stack.grpc) as client:
            await client.complete(prompt, params)

    async def finish(self) -> Counter[str]:
        """Return what happened, the stack's own counts included."""
        await self.rig.wait_whole()
        totals = await self.rig.router_metrics()
        self.events["moved"] += int(totals.get(MOVES, 0))
        self.events["pages pulled"] += int(totals.get("quire_router_pd_pulled_pages_total", 0))
        for port in self.metrics.values():
            async with httpx.AsyncClient(trust_env=False) as http:
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
            found = re.findall(r"^quire_scheduler_preemptions_total\S* (\S+)", text, re.M)
            self.events["preempted"] += int(sum(map(float, found)))
        self.rig.wait_pages_back()
        return self.events


@asynccontextmanager
async def stage(engine: str, *, split: bool) -> AsyncIterator[Stage]:
    """Start two whole replicas, or two replicas for prefill and two for decode."""
    worker: dict[str, str | bool] = {"max-num-seqs": "16"}
    worker |= {"kv-cache-memory-bytes": str(PAGES * PAGE_BYTES)} if engine == "cpu" else {"paced-pages": str(PAGES)}
    names = [f"scheduler-{role}{at}" for role in (("prefill-", "decode-") if split else ("",)) for at in (1, 2)]
    metrics = dict(zip(names, free_ports(len(names)), strict=True))
    flags: dict[str, dict[str, str | bool]] = {
        "worker": worker,
        **{name: {"metrics-listen": f"127.0.0.1:{port}"} for name, port in metrics.items()},
    }
    rig = PdRig(engine, flags=pd_flags(0.0, flags)) if split else Rig(engine, flags=flags)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rig)
        await rig.wait_whole()
        host, _, port = rig.stack.grpc.rpartition(":")
        relay = stack.enter_context(TcpRelay((host, int(port))))
        client = AsyncClient(f"127.0.0.1:{relay.port}", reconnect_s=RECONNECT_S)
        await stack.enter_async_context(client)
        yield Stage(rig, client, relay, metrics)


def _shown(output: RequestOutput) -> Any:
    """Return all that must be equal."""
    return [
        (each.text, each.token_ids, each.reasoning, each.tool_calls, each.finish_reason, each.stop_reason)
        for each in sorted(output.outputs, key=lambda each: each.index)
    ]


def _check_form(scenario: Scenario, output: RequestOutput) -> None:
    """Assert that choices which ended have the form."""
    for each in output.outputs:
        if each.finish_reason != "stop":
            continue
        if scenario.kind == "regex":
            assert re.fullmatch(scenario.form, each.text), (str(scenario), each.text)
        elif scenario.kind == "choice":
            assert each.text in scenario.form
        elif scenario.kind == "json":
            jsonschema.validate(orjson.loads(each.text), scenario.form)
        elif scenario.kind == "tools":
            assert each.tool_calls and all(orjson.loads(call.arguments) for call in each.tool_calls)


async def judge(engine: str, scenarios: list[Scenario]) -> Counter[str]:
    """Serve the scenarios and return what happened. Raises AssertionError with all that went wrong. The answers that
    are wanted are those of whole replicas."""
    events, wrong, wanted = Counter[str](), list[str](), dict[int, Any]()
    for split in (False, True):
        own = [each for each in scenarios if each.split == split]
        if not own and split:
            continue
        async with stage(engine, split=split) as stack:
            for scenario in scenarios if not split else ():
                wanted[scenario.number] = await stack.undisturbed(scenario)
            for scenario in own:
                expected = wanted[scenario.number]
                tokens = sum(len(choice[1]) for choice in expected)
                try:
                    found = await stack.disturbed(scenario, tokens)
                    if found != expected:
                        wrong.append(f"{scenario}:\n  {found}\n  instead of\n  {expected}")
                except Exception as error:  # each scenario is judged, and all are told
                    wrong.append(f"{scenario}: {type(error).__name__}: {error}")
            events += await stack.finish() if not wrong else stack.events
    assert not wrong, "\n".join(wrong)
    return events


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often clients have resumed a choice."""
    found, take_up = Counter[str](), GenerateCall._take_up

    def counting(self: GenerateCall, index: int) -> None:
        found["resumed by the client"] += 1
        take_up(self, index)

    monkeypatch.setattr(GenerateCall, "_take_up", counting)
    return found


@pytest.mark.parametrize("engine", ENGINES)
async def test_answers_with_a_form_are_the_same_whatever_happens(engine: str, counted: Counter[str]) -> None:
    events = await judge(engine, [make_scenario(number) for number in range(SCENARIOS)])
    events += counted
    print(f"\n{engine}: {dict(events)}")
    rare = {name: events[name] for name, least in LEAST.items() if events[name] < least}
    assert SCENARIOS < 50 or not rare, f"these hardly happened: {rare}, of {events}"


def _forget_the_characters_of_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Delta, "characters", property(lambda self: len(self.text)))


def _forget_the_last_token(patch: pytest.MonkeyPatch) -> None:
    take_up = GenerateCall._take_up

    def forgetful(self: GenerateCall, index: int) -> None:
        del self._choices[index].ids[-1:]
        take_up(self, index)

    patch.setattr(GenerateCall, "_take_up", forgetful)


@pytest.mark.parametrize("break_rule", [_forget_the_characters_of_calls, _forget_the_last_token])
async def test_a_client_that_resumes_wrongly_is_noticed(break_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [each for each in map(make_scenario, range(200)) if not each.split and {e for _, e in each.events} == {CUT}]
    calls = [each for each in cut if each.kind == "tools"][:3]
    break_rule(monkeypatch)
    with pytest.raises(AssertionError, match=r"instead of|RESUME_MISMATCH"):
        await judge("paced 10", calls)
