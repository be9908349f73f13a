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

from bench.busy_process import BusyProcess
from quire.cli.terminal import table
from tests.abuse.references import Heard, References
from tests.chaos.rig import Rig

KEY = "the-key-of-abuse"
MOST_CPU_MS, MOST_GROWTH_MIB, MOST_GAP = 50.0, 128.0, 1.5
STEP_MS = 25
SETTLE_S = 2.0
NOISE_S = 0.1
"""Of gaps on a machine that has other work too."""
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

    def findings(self, gap_s: float) -> list[str]:
        """What is wrong, beside a longest gap under the same load without abuse."""
        found = [f"{len(self.heard.ended)} streams ended: {self.heard.ended[0]}"] if self.heard.ended else []
        if self.heard.wrong:
            found.append(f"{self.heard.wrong} answers differ")
        if not self.heard.gaps_s:
            found.append("no stream went on")
        if self.cpu_ms > MOST_CPU_MS:
            found.append(f"{self.cpu_ms:.0f} ms of CPU in {self.culprit}")
        if self.growth_mib > MOST_GROWTH_MIB:
            found.append(f"{self.grown} grew by {self.growth_mib:.0f} MiB")
        if self.heard.longest_s > MOST_GAP * gap_s + NOISE_S:
            found.append(f"a gap of {self.heard.longest_s:.2f} s, {gap_s:.2f} s under load without abuse")
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
        self._rig = Rig(f"paced {STEP_MS}", replicas=1, tokenizers=2, api_keys=(KEY,), commands=commands)
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
        self.before_mib = self._resident_mib()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._references.__aexit__(None, None, None)
        await self._rig.__aexit__(*error)  # type: ignore[arg-type]  # what the interpreter gives

    async def posts(self) -> set[str]:
        """Paths that take a POST, as the stack's own document has them."""
        document = (await self._rig.http.get("/openapi.json")).json()
        return {path for path, methods in document["paths"].items() if "post" in methods}

    async def under_load(self, seconds: float) -> CaseResult:
        """Two processes that compute all the time, and no abuse."""
        with ExitStack() as busy:
            for _ in range(2):
                busy.enter_context(BusyProcess())
            return await self._measure("load without abuse", asyncio.sleep(seconds))

    async def case(self, name: str, seconds: float) -> CaseResult:
        """One case, from a process of its own."""
        ready = self._rig.stack.ready
        command = [sys.executable, "-m", "tests.abuse.attacks", name, ready.http, self._rig.stack.grpc, KEY]
        process = await asyncio.create_subprocess_exec(
            *command, str(seconds), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(seconds + 60.0):
                outcome = self._measure(name, process.communicate())
                result = await outcome
        finally:
            if process.returncode is None:
                process.kill()
        return result

    async def _measure(self, name: str, work: Coroutine[Any, Any, object]) -> CaseResult:
        self._references.take()
        before = self._resident_mib()
        began, peak = time.monotonic(), dict(before)
        task = asyncio.ensure_future(work)
        while not task.done():
            for member, mib in self._resident_mib().items():
                peak[member] = max(peak.get(member, 0.0), mib)
            await asyncio.wait([task], timeout=0.2)
        told = task.result()
        await asyncio.sleep(SETTLE_S)  # gaps that began in it end
        result = CaseResult(name, self._references.take())
        if isinstance(told, tuple):
            if not told[0]:
                raise RuntimeError(f"{name}: the attack failed: {told[1].decode()[-2000:]}")
            said = json.loads(told[0])
            result.requests, result.refusals = said["requests"], said["refusals"]
        growth = {member: mib - before.get(member, mib) for member, mib in peak.items()}
        result.grown = max(growth, key=lambda member: growth[member])
        result.growth_mib = growth[result.grown]
        result.cpu_ms, result.culprit = self._spent(began)
        now = {m: s.process.pid for m, s in self._rig.state().services.items()}
        result.died = ", ".join(f"{m} died" for m in now if now[m] != self._started[m])
        self._started = now
        self.results.append(result)
        return result

    def kept(self) -> list[str]:
        """Which processes have grown too much over all cases."""
        grown = {m: mib - self.before_mib.get(m, mib) for m, mib in self._resident_mib().items()}
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

    def _resident_mib(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for member, service in self._rig.state().services.items():
            try:
                process = psutil.Process(service.process.pid)
                family = [process, *process.children(recursive=True)]
                found[member] = max(each.memory_info().rss for each in family) / (1 << 20)
            except psutil.Error:  # it died; the table says so
                continue
        return found


def show(results: list[CaseResult]) -> str:
    """For people."""
    rows = [
        [
            result.name,
            str(result.requests),
            ", ".join(f"{count} {cause}" for cause, count in result.refusals[:3]),
            f"{result.heard.longest_s * 1e3:.0f}",
            f"{result.cpu_ms:.0f} {result.culprit}",
            f"{result.growth_mib:.0f} {result.grown}",
            f"{len(result.heard.ended)}/{result.heard.wrong}",
        ]
        for result in results
    ]
    header = ["case", "requests", "refused", "longest gap ms", "CPU max ms", "growth MiB", "ended/wrong"]
    return table(header, rows, right=(1, 3, 6))
