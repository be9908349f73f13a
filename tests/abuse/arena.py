"""A stack whose threads are watched, sixteen streams on it, and cases of abuse beside them, measured one by one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.harness.busy_process import BusyProcess
from quire.cli.output.terminal import table
from tests.abuse.cpu_load import CpuLoad
from tests.abuse.references import Heard, References
from tests.chaos.rig import Rig

KEY = "the-key-of-abuse"
MOST_CPU_MS, MOST_GROWTH_MIB, MOST_GAP = 50.0, 128.0, 1.5
STEP_MS = 25
ROWS = 512
"""That the worker decodes in one step: more than the abuse can fill. A stream that waits for a row behind others that
came before it is no harm: as many honest requests would make it wait as long."""
SETTLE_S = 2.0
_IDLE_S = 3.0
NOISE_S = 0.1
"""Of gaps on a machine that has other work too."""
PAIRS = 3
"""A case and the same load without abuse, one after the other, where gaps seem too long: a burst of the machine's other
work looks the same once, but a service's fault shows each time."""
LEAST_BUSY, MOST_BUSY = 2, 4 * (os.cpu_count() or 1)
"""Processes that compute in place of abuse. The upper bound keeps services that start ever more threads from being
excused by the load that these make."""
WATCHED = str(Path(__file__).with_name("watched.py"))
ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("router", "tokenizer", "scheduler", "worker")


@dataclass
class CaseResult:
    """One row of the table."""

    name: str
    heard: Heard
    requests: int = 0
    refusals: list[tuple[str, int]] = field(default_factory=list)
    cpu_ms: float = 0.0
    culprit: str = ""
    growth_mib: float = 0.0
    grown: str = ""
    died: str = ""
    threads: float = 0.0
    """The most that wanted a core at once, of the services and of the abusive client."""

    def slow(self, calm_s: float) -> list[str]:
        """Whether gaps are too long, beside the longest under the same load without abuse."""
        longest_s = self.heard.longest_s
        if longest_s <= MOST_GAP * calm_s + NOISE_S:
            return []
        return [f"{self.name}: a gap of {longest_s:.2f} s, {calm_s:.2f} s under the same load without abuse"]

    def findings(self) -> list[str]:
        """Findings of the case other than gaps."""
        found = [f"{len(self.heard.ended)} streams ended: {self.heard.ended[0]}"] if self.heard.ended else []
        if self.heard.wrong:
            found.append(f"{self.heard.wrong} answers differ")
        if not self.heard.gaps_s:
            found.append("no stream went on")
        if self.cpu_ms > MOST_CPU_MS:
            found.append(f"{self.cpu_ms:.0f} ms of CPU in {self.culprit}")
        if self.growth_mib > MOST_GROWTH_MIB:
            found.append(f"{self.grown} grew by {self.growth_mib:.0f} MiB")
        if self.requests == 0:
            found.append("no request was sent")
        if self.died:
            found.append(self.died)
        return [f"{self.name}: {each}" for each in found]


class Arena:
    """A context. `folder` takes the watchers' lines."""

    def __init__(self, folder: Path, mutation: str = "") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["QUIRE_ABUSE_LOG"] = str(folder)
        os.environ["QUIRE_ABUSE_MUTATION"] = mutation
        commands = {service: (sys.executable, WATCHED, service) for service in SERVICES}
        flags = {"worker": {"max-num-seqs": str(ROWS)}, "router": {"max-bodies-mib": "128"}}
        self._rig = Rig(f"paced {STEP_MS}", replicas=1, tokenizers=2, flags=flags, api_keys=(KEY,), commands=commands)
        self._rig.http.headers["Authorization"] = f"Bearer {KEY}"
        self._references = References(self._rig.stack.ready.http, self._rig.stack.grpc, KEY)
        self.results: list[CaseResult] = []

    async def __aenter__(self) -> Arena:
        await self._rig.__aenter__()
        await self._rig.wait_whole()
        await self._references.__aenter__()
        await asyncio.sleep(SETTLE_S)
        self._references.take()
        self._started = {m: s.process.pid for m, s in self._rig.state().services.items()}
        self.before_mib, _ = await self._look()
        self._idle_threads = (await self._measure("nothing else", asyncio.sleep(_IDLE_S))).threads
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._references.__aexit__(None, None, None)
        await self._rig.__aexit__(*error)  # type: ignore[arg-type]  # what the interpreter gives

    async def posts(self) -> set[str]:
        """Paths that take a POST, as the stack's own document has them."""
        document = (await self._rig.http.get("/openapi.json")).json()
        return {path for path, methods in document["paths"].items() if "post" in methods}

    async def case(self, name: str, seconds: float) -> list[str]:
        """One case, and the same load without abuse after it; what is wrong."""
        found, slow = list[str](), list[str]()
        for _ in range(PAIRS):
            result = await self._attacked(name, seconds)
            found += result.findings()
            calm = await self._calm(name, seconds, result.threads)
            slow = result.slow(calm.heard.longest_s)
            if not slow:
                break
        return found + slow

    async def _calm(self, name: str, seconds: float, threads: float) -> CaseResult:
        """As many processes that compute all the time as threads wanted a core beside those of the streams."""
        count = min(max(round(threads - self._idle_threads), LEAST_BUSY), MOST_BUSY)
        with ExitStack() as busy:
            for _ in range(count):
                busy.enter_context(BusyProcess())
            return await self._measure(f"  {count} busy processes", asyncio.sleep(seconds))

    async def _attacked(self, name: str, seconds: float) -> CaseResult:
        """One case, from a process of its own."""
        ready = self._rig.stack.ready
        command = [sys.executable, "-m", "tests.abuse.attacks", name, ready.http, self._rig.stack.grpc, KEY]
        process = await asyncio.create_subprocess_exec(
            *command, str(seconds), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(seconds + 60.0):
                outcome = self._measure(name, process.communicate(), process.pid)
                result = await outcome
        finally:
            if process.returncode is None:
                process.kill()
        return result

    async def _measure(self, name: str, work: Coroutine[Any, Any, object], client: int | None = None) -> CaseResult:
        before, _ = await self._look()
        self._references.take()
        began, peak, load = time.monotonic(), dict(before), CpuLoad()
        task = asyncio.ensure_future(work)
        while not task.done():
            resident, pids = await self._look()
            for member, mib in resident.items():
                peak[member] = max(peak.get(member, 0.0), mib)
            await asyncio.to_thread(load.sample, pids if client is None else [*pids, client])
            await asyncio.wait([task], timeout=0.2)
        told = task.result()
        await asyncio.sleep(SETTLE_S)  # gaps that began in it end
        result = CaseResult(name, self._references.take(), threads=load.threads)
        if isinstance(told, tuple):
            if not told[0]:
                raise RuntimeError(f"{name}: the attack failed: {told[1].decode()[-2000:]}")
            said = json.loads(told[0])
            result.requests, result.refusals = said["requests"], said["refusals"]
        growth = {member: mib - before.get(member, mib) for member, mib in peak.items()}
        result.grown = max(growth, key=lambda member: growth[member])
        result.growth_mib = growth[result.grown]
        result.cpu_ms, result.culprit = await asyncio.to_thread(self._spent, began)
        now = {m: s.process.pid for m, s in self._rig.state().services.items()}
        result.died = ", ".join(f"{m} died" for m in now if now[m] != self._started[m])
        self._started = now
        self.results.append(result)
        return result

    async def kept(self) -> list[str]:
        """Which processes have grown too much over all cases."""
        resident, _ = await self._look()
        grown = {m: mib - self.before_mib.get(m, mib) for m, mib in resident.items()}
        return [f"all cases: {m} grew by {mib:.0f} MiB" for m, mib in grown.items() if mib > MOST_GROWTH_MIB]

    def _spent(self, since: float) -> tuple[float, str]:
        """The most of one callback or step, and whose it was."""
        most = (0.0, "")
        for path in self._folder.glob("*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                if found["at"] >= since:
                    most = max(most, (found["cpu_ms"], f"{path.stem.partition('-')[0]} {found['what']}"))
        return most

    async def _look(self) -> tuple[dict[str, float], list[int]]:
        """Resident MiB of members, and all processes of the services. In a thread: psutil reads all of /proc, and the
        loop, which hears the streams, would take that for a gap."""
        return await asyncio.to_thread(self._families)

    def _families(self) -> tuple[dict[str, float], list[int]]:
        resident, pids = dict[str, float](), list[int]()
        for member, service in self._rig.state().services.items():
            try:
                process = psutil.Process(service.process.pid)
                family = [process, *process.children(recursive=True)]
                resident[member] = max(each.memory_info().rss for each in family) / (1 << 20)
            except psutil.Error:  # it died; the table says so
                continue
            pids += [each.pid for each in family]
        return resident, pids


def show(results: list[CaseResult]) -> str:
    """For people."""
    rows = [
        [
            result.name,
            str(result.requests),
            ", ".join(f"{count} {cause}" for cause, count in result.refusals[:3]),
            f"{result.heard.longest_s * 1e3:.0f}",
            f"{result.threads:.1f}",
            f"{result.cpu_ms:.0f} {result.culprit}",
            f"{result.growth_mib:.0f} {result.grown}",
            f"{len(result.heard.ended)}/{result.heard.wrong}",
        ]
        for result in results
    ]
    header = ["case", "requests", "refused", "longest gap ms", "threads", "CPU max ms", "growth MiB", "ended/wrong"]
    return table(header, rows, right=(1, 3, 4, 7))
