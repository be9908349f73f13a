"""`make compose-test`: starts each profile of deploy/compose, except gpu, with podman-compose, and prints a line for
each.

Each stack must answer over HTTPS with a key, go on when a container is killed, and survive a restart of each service
under load. There must be no error, and the answers must be those of an undisturbed stack. The test needs root and the
images of `make images`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

from tools.compose_test.load import LONG_PROMPT, PROMPTS, Load
from tools.compose_test.observed import all_targets_up, pages_moved
from tools.compose_test.stack import ComposeStack

_SETTLE_S = 3.0
# It is one process, so its restart ends all connections.
_BALANCER = "balancer"


@dataclass(frozen=True)
class Case:
    """A stack, and the steps of its test."""

    name: str
    profiles: tuple[str, ...]
    killed: tuple[str, ...]
    # A request that the only router does not answer because it restarts is tried again.
    reconnects: bool
    port: str = "QUIRE_PORT"
    settings: dict[str, str] = field(default_factory=dict)
    prompts: tuple[str, ...] = PROMPTS


CASES = (
    Case("default", ("default",), ("worker",), reconnects=True),
    Case("two", ("two",), ("worker-2", "scheduler", "tokenizer"), reconnects=False, port="QUIRE_BALANCER_PORT"),
    Case(
        "pd",
        ("pd",),
        ("worker-prefill", "scheduler-decode"),
        reconnects=True,
        settings={"QUIRE_PD_BY_RATES": "false", "QUIRE_PD_THRESHOLD_TOKENS": "256"},
        prompts=(LONG_PROMPT, *PROMPTS),
    ),
    Case("observability", ("default", "observability"), ("kvstore", "prometheus"), reconnects=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("profiles", nargs="*", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--keep", action="store_true", help="leave a failed stack for a look at it")
    arguments = parser.parse_args()
    if unknown := {*arguments.profiles} - {*names}:
        parser.error(f"there is no profile {', '.join(sorted(unknown))}")
    failed = 0
    for case in CASES:
        if case.name in (arguments.profiles or names):
            failed += not _passes(case, keep=arguments.keep)
    return int(failed > 0)


def _passes(case: Case, *, keep: bool) -> bool:
    """Run a case, print its line, and remove the stack."""
    stack = ComposeStack(case.profiles, case.settings)
    errors: list[str] = []
    try:
        line = asyncio.run(_run(case, stack, errors))
    except BaseException:
        if not keep:
            stack.down()
        raise
    print(f"{case.name}: {'FAILED' if errors else 'passed'}: {line}", flush=True)
    for error in errors[:10]:
        print(f"    {error}")
    if not (errors and keep):
        stack.down()
    return not errors


async def _run(case: Case, stack: ComposeStack, errors: list[str]) -> str:
    """Return the line about the case. Faults are added to `errors`."""
    began = time.monotonic()
    await asyncio.to_thread(stack.up)
    await asyncio.to_thread(stack.wait_ready)
    said = [f"{len(stack.services)} services ready in {time.monotonic() - began:.0f} s"]
    await asyncio.to_thread(stack.check_health)
    ca, key = stack.secret("public-ca"), stack.secret("key")
    load = Load(stack.url(case.port), ca, key, reconnects=case.reconnects, prompts=case.prompts)
    try:
        await load.learn()
        said.append(f"{len(case.prompts)} prompts answered")
        if case.name == "pd":
            moved = await asyncio.to_thread(pages_moved, stack, "worker-decode")
            said.append(f"{moved} pages moved from prefill to decode")
            errors += [] if moved else ["no page moved from the prefill to the decode worker"]
        if "observability" in case.profiles:
            said.append(await asyncio.to_thread(all_targets_up, stack, errors))
        for service in case.killed:
            async with load.running():
                await asyncio.sleep(_SETTLE_S)
                await asyncio.to_thread(stack.kill, service)
                await asyncio.sleep(_SETTLE_S)
                await asyncio.to_thread(stack.wait_ready)
            said.append(f"{service} killed: {load.taken()}")
        began = time.monotonic()
        others = [service for service in stack.services if service != _BALANCER]
        async with load.running():
            for service in others:
                await asyncio.to_thread(stack.restart, service)
                await asyncio.sleep(_SETTLE_S)
        said.append(f"{len(others)} restarted one by one in {time.monotonic() - began:.0f} s: {load.taken()}")
        if _BALANCER in stack.services:
            await asyncio.to_thread(stack.restart, _BALANCER)
            await asyncio.sleep(_SETTLE_S)
            await load.ask_again()
            said.append(f"{_BALANCER} restarted between requests: {load.taken()}")
    finally:
        await load.close()
    errors += load.errors
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
