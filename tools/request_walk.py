"""Lists the files that a request passes, in order: `python -m tools.request_walk`.

A stack of the five services answers `POST /v1/completions` several times. Each service runs under a profiler that
records calls of Quire's functions. The functions of HANDED_OUT and HANDED_BACK hand the request from one part of Quire
to the next. A file is on the way if one of its functions is on the call stack at such a call, in every run. The way out
ends where the worker's step begins, and the way back begins where that step ends.

To follow a prompt, open these files. Files that a function only consults (a check, a counter, a clock) are not on the
way; `--all` lists them too.

`python tools/request_walk.py SERVICE FLAGS...` is `python -m quire_SERVICE FLAGS...` under that profiler. On SIGUSR2 it
writes the calls since the last SIGUSR2.
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
from collections.abc import Sequence
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
HANDED_OUT = (
    "parse_completion",
    "TokenizeStream.ask",
    "Encoder.encode",
    "Placer.place",
    "SessionOutgoing.submit",
    "sequence_into_pb",
    "sequence_from_pb",
    "PendingQueue.enter",
    "Admission.plan_starts",
    "encode_grant",
    "decode_grant",
    "RunLoop.granted",
    "SlotTable.fill",
    "StepBuilder.build",
    "ThreadDevice.launch",
    "StepRunner.run",
)
HANDED_BACK = (
    "complete_step",
    "encode_report",
    "decode_report",
    "OutputProcessor.update_from_report",
    "OutputBuffer.add_rows",
    "Session.deliver",
    "put_columns",
    "EngineProgress.add_row",
    "DetokenizeOutgoing.rows",
    "Detokenizer.step",
    "TextStream.advance",
    "SequenceState.add_text",
    "ClientProgress.take_delta",
    "CompletionFormat.frame",
)
_RUNS, _WARMUPS = 8, 3
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """One call. `stack` has the files of the functions above it in its thread, the outermost first, and the function's
    own file."""

    at_ns: int
    service: str
    function: str
    stack: tuple[str, ...]
    returned_ns: int

    @property
    def file(self) -> str:
        """Return the function's own file."""
        return self.stack[-1]


class CallRecorder:
    """A profile function for all threads of a process. It records calls of functions whose file is part of Quire."""

    def __init__(self, service: str, folder: Path) -> None:
        self._service, self._folder = service, folder
        # Time in ns, thread, code, and whether the function returned or yielded.
        self._events: list[tuple[int, int, CodeType, bool]] = []
        self._ours: dict[CodeType, bool] = {}
        self._written = 0

    def install(self) -> None:
        """Install the recorder for this thread and all later threads. Call this before the service is imported."""
        signal.signal(signal.SIGUSR2, lambda *_: self.write())
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "return"):
            code = frame.f_code
            ours = self._ours.get(code)
            if ours is None:
                ours = self._ours[code] = is_ours(code.co_filename)
            if ours:
                self._events.append((time.monotonic_ns(), threading.get_ident(), code, event == "return"))

    def write(self) -> None:
        """Write the calls since the last time to a JSON file."""
        events, self._events = self._events, []
        self._written += 1
        rows = [
            (at, self._service, thread, os.path.relpath(code.co_filename, ROOT), code.co_qualname, returned)
            for at, thread, code, returned in events
        ]
        path = self._folder / f"{self._service}-{os.getpid()}-{self._written}.json"
        path.with_suffix(".part").write_text(json.dumps(rows), encoding="utf-8")
        path.with_suffix(".part").rename(path)


def calls_of(rows: list[Any]) -> list[Call]:
    """Return the calls of one process, with their stacks, from the rows of a recorder."""
    open_calls: dict[int, list[tuple[int, str, str]]] = {}
    found = []
    for at, service, thread, file, function, returned in rows:
        stack = open_calls.setdefault(thread, [])
        if not returned:
            stack.append((at, file, function))
        elif stack and stack[-1][1:] == (file, function):
            began, _, _ = stack[-1]
            found.append(Call(began, service, function, tuple(each[1] for each in stack), at))
            stack.pop()
        # else it began before the recording
    for stack in open_calls.values():
        for depth, (began, _, function) in enumerate(stack):
            files = tuple(each[1] for each in stack[: depth + 1])
            found.append(Call(began, rows[0][1], function, files, time.monotonic_ns()))
    return sorted(found, key=lambda call: call.at_ns)


def is_ours(file: str) -> bool:
    """Whether a source file is part of Quire's hand-written code. Stubs and the process's own telemetry do not
    count."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or not path.is_file():
        return False
    parts = path.relative_to(ROOT).parts
    return parts[0] in {"quire", "services"} and parts[:2] != ("quire", "v1")


def out_and_back(calls: list[Call], began_ns: int, ended_ns: int) -> tuple[list[Call], list[Call]]:
    """Return the calls before the step and the calls after it, for one request that took one step. Raises ValueError if
    no step began or ended within the request."""
    during = sorted((c for c in calls if began_ns <= c.at_ns <= ended_ns), key=lambda c: c.at_ns)
    steps = [call for call in during if call.function == _STEP]
    if not steps:
        raise ValueError("the worker made no step during the request")
    begin_ns, end_ns = steps[0].at_ns, steps[-1].returned_ns
    return [c for c in during if c.at_ns <= begin_ns], [c for c in during if c.at_ns > end_ns]


def on_the_way(calls: list[Call], handed: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return service, file and function of each file that is on a stack when the request is handed on, in the order of
    the hand-overs. Raises ValueError for a hand-over that was not made, because the names above are then out of
    date."""
    missing = [name for name in handed if all(call.function != name for call in calls)]
    if missing:
        raise ValueError(f"these functions were not called: {', '.join(missing)}")
    found: dict[str, tuple[str, str, str]] = {}
    for name in handed:
        for call in calls:
            if call.function == name:
                for file in call.stack:
                    found.setdefault(file, (call.service, file, name))
    return list(found.values())


def in_every_run(runs: list[list[tuple[str, str, str]]]) -> list[tuple[str, str, str]]:
    """Return the files that all runs have, in the order of the last run."""
    everywhere = set.intersection(*({file for _, file, _ in run} for run in runs))
    return [row for row in runs[-1] if row[1] in everywhere]


def walk(runs: list[tuple[list[Call], list[Call]]]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return the files on the way out and on the way back."""
    return (
        in_every_run([on_the_way(out, HANDED_OUT) for out, _ in runs]),
        in_every_run([on_the_way(back, HANDED_BACK) for _, back in runs]),
    )


def touched(calls: list[Call]) -> list[tuple[str, str, str]]:
    """Return each file with its first call."""
    first: dict[str, tuple[str, str, str]] = {}
    for call in calls:
        first.setdefault(call.file, (call.service, call.file, call.function))
    return list(first.values())


def trace(runs: int = _RUNS) -> list[tuple[list[Call], list[Call]]]:
    """Start a stack, send this many requests, and return the calls of each run, out and back."""
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
    return found


def service_pids(stack: Any) -> list[int]:
    """Return the pids of the stack's services."""
    return [service.process.pid for service in stack.directory.read().services.values()]


def _ask(http: str) -> tuple[int, int]:
    """Request one token as a stream. Returns when the request was sent and when its first event came, on the clock of
    the calls."""
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
    calls = [call for path in found for call in calls_of(json.loads(path.read_text(encoding="utf-8")))]
    for path in found:
        path.unlink()
    return calls


def show(title: str, files: Sequence[tuple[str, str, str]], passed: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return a Markdown table. `passed` are files of an earlier table; the table says how many files are new."""
    rows = "\n".join(f"| {n} | {service} | `{file}` | `{at}` |" for n, (service, file, at) in enumerate(files, 1))
    new = len({file for _, file, _ in files} - {file for _, file, _ in passed})
    count = f"{len(files)} files" + (f", {new} of them new" if passed else "")
    return f"### {title}: {count}\n\n| | service | file | handed on in |\n|---|---|---|---|\n{rows}\n"


def serve(service: str, flags: list[str]) -> int:
    """Run the service under the recorder, and return its exit code."""
    CallRecorder(service, Path(os.environ[CALLS])).install()
    sys.argv = [f"quire_{service}", *flags]
    module = __import__(f"quire_{service}.__main__", fromlist=["main"])
    return int(module.main())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The files that a request passes, out and back.")
    parser.add_argument("--runs", type=int, default=_RUNS, help="requests; a file must be passed by each (default 8)")
    parser.add_argument("--all", action="store_true", help="also the files that are only consulted")
    arguments = parser.parse_args()
    runs = trace(arguments.runs)
    out, back = walk(runs)
    if arguments.all:
        print(show("Out, every file that was touched", in_every_run([touched(calls) for calls, _ in runs])))
        print(show("Back, every file that was touched", in_every_run([touched(calls) for _, calls in runs])))
    print(show("Out", out))
    print(show("Back", back, out))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SERVICES:
        sys.exit(serve(sys.argv[1], sys.argv[2:]))
    main()
