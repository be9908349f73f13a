"""The files that a request passes, in order: `python -m tools.request_walk`.

A stack of the five services answers `POST /v1/completions` several times, each service under a profiler that notes
every call of a function of Quire. A file is on the way out if, in every run, one of its functions was called between
the POST and the beginning of the worker's step; and on the way back, if one was called between the end of the step and
the client's first event. What runs now and then besides (heartbeats, load reports) is not in every run.

`python tools/request_walk.py SERVICE FLAGS...` is `python -m quire_SERVICE FLAGS...` under that profiler; SIGUSR2
makes it write what was called since the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
CALLS = "QUIRE_WALK_CALLS"
"""The environment's name of the folder into which services write their calls."""
# The function that is the worker's step.
_STEP = "StepRunner.run"
_RUNS, _WARMUPS = 8, 3
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """One call, or the return of the worker's step."""

    at_ns: int
    service: str
    file: str
    function: str
    returned: bool = False


class CallRecorder:
    """A profile function for all threads of a process; keeps the calls of functions whose file is part of Quire."""

    def __init__(self, service: str, folder: Path) -> None:
        self._service, self._folder = service, folder
        self._calls: list[tuple[int, CodeType, bool]] = []
        self._ours: dict[CodeType, bool] = {}
        self._written = 0

    def install(self) -> None:
        """For this thread and all that begin later; before the service is imported."""
        signal.signal(signal.SIGUSR2, lambda *_: self.write())
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" or (event == "return" and frame.f_code.co_qualname == _STEP):
            code = frame.f_code
            ours = self._ours.get(code)
            if ours is None:
                ours = self._ours[code] = is_ours(code.co_filename)
            if ours:
                self._calls.append((time.monotonic_ns(), code, event == "return"))

    def write(self) -> None:
        """What was called since the last time, as a file of JSON."""
        calls, self._calls = self._calls, []
        self._written += 1
        rows = [
            (at, self._service, os.path.relpath(code.co_filename, ROOT), code.co_qualname, returned)
            for at, code, returned in calls
        ]
        path = self._folder / f"{self._service}-{os.getpid()}-{self._written}.json"
        path.with_suffix(".part").write_text(json.dumps(rows), encoding="utf-8")
        path.with_suffix(".part").rename(path)


def is_ours(file: str) -> bool:
    """Whether a source file is one of Quire's that people write: stubs and telemetry of the process do not count."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or not path.is_file():
        return False
    parts = path.relative_to(ROOT).parts
    return parts[0] in {"quire", "services"} and parts[:2] != ("quire", "v1")


def way(runs: list[list[Call]]) -> list[Call]:
    """The first call of each file that is in every run, in the order of the last run."""
    everywhere = set.intersection(*({call.file for call in calls} for calls in runs))
    first: dict[str, Call] = {}
    for call in runs[-1]:
        if call.file in everywhere:
            first.setdefault(call.file, call)
    return list(first.values())


def out_and_back(calls: list[Call], began_ns: int, ended_ns: int) -> tuple[list[Call], list[Call]]:
    """The calls before the step and those after it, of one request that took one step. Raises ValueError if no step
    began or none ended within the request."""
    during = sorted((c for c in calls if began_ns <= c.at_ns <= ended_ns), key=lambda c: c.at_ns)
    steps = [call for call in during if call.function == _STEP]
    begins, ends = ([c.at_ns for c in steps if c.returned is returned] for returned in (False, True))
    if not begins or not ends:
        raise ValueError("the worker made no step during the request")
    return (
        [call for call in during if call.at_ns <= begins[0] and not call.returned],
        [call for call in during if call.at_ns > ends[-1]],
    )


def trace(runs: int = _RUNS) -> tuple[list[Call], list[Call]]:
    """Start a stack, ask it, and return the files on the way out and on the way back."""
    from quire.local.spec import StackSpec
    from quire.local.stack import LocalStack
    from quire.models import find_model

    with tempfile.TemporaryDirectory() as folder:
        os.environ[CALLS] = folder
        os.environ.setdefault("QUIRE_STATE_DIR", str(Path(folder, "state")))
        commands = {service: (sys.executable, str(Path(__file__)), service) for service in SERVICES}
        stack = LocalStack(StackSpec(f"walk-{os.getpid()}", str(find_model(None)), commands=commands))
        try:
            pids = service_pids(stack)
            for _ in range(_WARMUPS):
                _ask(stack.ready.http)
            _collect(Path(folder), pids)
            found = []
            for _ in range(runs):
                time.sleep(0.3)
                began_ns, ended_ns = _ask(stack.ready.http)
                found.append(out_and_back(_collect(Path(folder), pids), began_ns, ended_ns))
        finally:
            stack.close()
    return way([out for out, _ in found]), way([back for _, back in found])


def service_pids(stack: Any) -> list[int]:
    """Of the stack's services."""
    return [service.process.pid for service in stack.directory.read().services.values()]


def _ask(http: str) -> tuple[int, int]:
    """One token, streamed. Returns when it was sent and when its first event came, on the clock of the calls."""
    import httpx

    body = {"prompt": f"To be {time.monotonic_ns()}", "max_tokens": 1, "stream": True, "ignore_eos": True}
    began_ns = time.monotonic_ns()
    with httpx.stream("POST", f"{http}/v1/completions", json=body, timeout=_LIMIT_S) as answer:
        answer.raise_for_status()
        heard_ns = [time.monotonic_ns() for line in answer.iter_lines() if line.startswith("data: ")]
    return began_ns, heard_ns[0]


def _collect(folder: Path, pids: list[int]) -> list[Call]:
    """Make every service write its calls, and read them."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + _LIMIT_S
    while len(found := list(folder.glob("*.json"))) < len(pids):
        if time.monotonic() > until:
            raise TimeoutError("a service did not write its calls")
        time.sleep(0.01)
    calls = [Call(*row) for path in found for row in json.loads(path.read_text(encoding="utf-8"))]
    for path in found:
        path.unlink()
    return calls


def show(title: str, calls: list[Call]) -> str:
    """A Markdown table."""
    rows = "\n".join(f"| {n} | {c.service} | `{c.file}` | `{c.function}` |" for n, c in enumerate(calls, 1))
    return f"## {title}: {len(calls)} files\n\n| | service | file | first function |\n|---|---|---|---|\n{rows}\n"


def serve(service: str, flags: list[str]) -> int:
    """The service under the recorder; its own exit code."""
    CallRecorder(service, Path(os.environ[CALLS])).install()
    sys.argv = [f"quire_{service}", *flags]
    module = __import__(f"quire_{service}.__main__", fromlist=["main"])
    return int(module.main())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The files that a request passes, out and back.")
    parser.add_argument("--runs", type=int, default=_RUNS, help="requests; a file must be passed by each (default 8)")
    out, back = trace(parser.parse_args().runs)
    print(show("Out", out))
    print(show("Back", back))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SERVICES:
        sys.exit(serve(sys.argv[1], sys.argv[2:]))
    main()
