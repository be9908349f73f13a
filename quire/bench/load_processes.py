"""Load from several processes, since one has one core. `python -m quire.bench.load_processes` is a child:

stdin:   the target, then {"max_concurrency"}, then one planned request per line, an empty line, the moment to begin
stdout:  `ready` once all is read, then one outcome per line; the child's alone: what else prints in it goes to stderr
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from time import perf_counter
from typing import IO, Any, TypeVar

from quire.bench.load import Load, PlannedRequest, outcome_from_json, outcome_to_json
from quire.bench.outcome import Outcome
from quire.bench.target import Target
from quire.errors import Internal

T = TypeVar("T")
# Between the last `ready` and the first request, so that all processes begin together.
_HEAD_START_S = 0.2


def run_load(
    target: Target, plan: Sequence[PlannedRequest], *, max_concurrency: int = 0, processes: int = 1
) -> tuple[float, list[Outcome]]:
    """Send the plan's requests from this process or from several, among which requests and `max_concurrency` (0: no
    limit) are divided; each process may send at least one at a time, so that more processes than `max_concurrency`
    exceed it. Returns the `perf_counter` time at which that began, and all outcomes by their index in the plan. Raises
    Internal, or BrokenPipeError, if a process fails. No child process is left."""
    if processes <= 1:
        begin_s = perf_counter()
        return begin_s, sorted(_run_here(target, plan, max_concurrency, begin_s), key=lambda outcome: outcome.index)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "quire.bench.load_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=-1,
        )
        for _ in range(processes)
    ]
    try:
        return _drive(children, target, plan, max_concurrency)
    finally:
        for child in children:
            child.kill()
            child.wait()
            _pipe(child.stdout).close()
            with contextlib.suppress(OSError):  # what it did not read is told to nobody
                _pipe(child.stdin).close()


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on uvloop where it is installed, else on asyncio, and return its result."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: T = uvloop.run(work)
    return result


def _run_here(target: Target, plan: Sequence[PlannedRequest], max_concurrency: int, begin_s: float) -> list[Outcome]:
    """Send the plan's requests from this process, on an event loop of its own, and return the outcomes."""

    async def run() -> list[Outcome]:
        return await Load(target, max_concurrency).run(plan, begin_s)

    return run_loop(run())


def _drive(
    children: Sequence[subprocess.Popen[str]], target: Target, plan: Sequence[PlannedRequest], max_concurrency: int
) -> tuple[float, list[Outcome]]:
    """Divide the plan and `max_concurrency` (at least 1 for each; 0: no limit) among the children by turns, and make
    all begin 0.2 s after the last is ready. Returns that time, and all outcomes in the order of the plan. Raises
    Internal if a child ends early, writes anything else, or loses requests, and BrokenPipeError if it ends before it
    has read its part."""
    count = len(children)
    for number, child in enumerate(children):
        stdin = _pipe(child.stdin)
        # Places are spread as evenly as requests; a process with none would wait for ever.
        places = max(1, (max_concurrency + count - 1 - number) // count) if max_concurrency else 0
        stdin.write(f"{target.to_json()}\n{json.dumps({'max_concurrency': places})}\n")
        stdin.writelines(f"{request.to_json()}\n" for request in plan[number::count])
        stdin.write("\n")
        stdin.flush()
    for child in children:
        if _pipe(child.stdout).readline() != "ready\n":
            raise Internal("LOAD_PROCESS", "A load process ended early.", "Its error is printed above.")
    begin_s = perf_counter() + _HEAD_START_S
    for child in children:
        stdin = _pipe(child.stdin)
        stdin.write(f"{begin_s!r}\n")
        stdin.close()
    try:
        outcomes = [outcome_from_json(line) for child in children for line in _pipe(child.stdout)]
    except (ValueError, TypeError) as error:
        raise Internal("LOAD_PROCESS", f"A load process said what is no outcome: {error}.", "This is a bug.") from error
    if len(outcomes) != len(plan):
        raise Internal("LOAD_PROCESS", "A load process lost requests.", "Its error is printed above.")
    return begin_s, sorted(outcomes, key=lambda outcome: outcome.index)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    """Return the pipe of a child process. Raises Internal if there is none."""
    if pipe is None:
        raise Internal("LOAD_PROCESS", "A load process has no pipe.", "This is a bug.")
    return pipe


def claim_stdout() -> int:
    """Return a new, blocking descriptor of the present standard output, for the caller alone. From now on, what this
    process prints goes to standard error."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    os.set_blocking(own, True)
    return own


def say(descriptor: int, line: str) -> None:
    """Write the line and a line feed to the descriptor, without buffering; returns when all of it is written."""
    data = memoryview(f"{line}\n".encode())
    while data:
        data = data[os.write(descriptor, data) :]


def _child() -> int:
    """The main function of a child process. It reads the target and the plan from stdin, writes `ready`, begins at the
    time that comes next, and writes the outcomes."""
    own = claim_stdout()
    target = Target.from_json(sys.stdin.readline())
    max_concurrency = json.loads(sys.stdin.readline())["max_concurrency"]
    plan = []
    while line := sys.stdin.readline().strip():
        plan.append(PlannedRequest.from_json(line))
    say(own, "ready")
    begin_s = float(sys.stdin.readline())
    for outcome in _run_here(target, plan, max_concurrency, begin_s):
        say(own, outcome_to_json(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(_child())
