"""Measures the time to the first token of the same prompts by the place of their pages: nowhere, on the device, in the
kvstore's memory, on its disk, in Redis. Five services run as processes, with one request at a time."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from bench.kvstore.floor import redis_process
from bench.prefix_cache.stack import Heard, PrefixStack

PAGE = 16
WARM_OF_COLD = 0.25
RAM_OF_COLD = 0.5
_AIMS = {"device": WARM_OF_COLD, "ram": RAM_OF_COLD}
_RAM = "--ram-bytes=1073741824"
# Phases that take less than this of a prompt's time are left out of the table.
_LEAST_MS = 1.0


def first_tokens(model: Path, prompts: int, tokens: int) -> bool:
    """Print the table. Returns whether all targets are met."""
    rng = np.random.default_rng(0)
    asked = [rng.integers(300, 1000, tokens).tolist() for _ in range(prompts)]
    warm_up = [rng.integers(300, 1000, tokens).tolist() for _ in range(3)]
    pages = prompts * ((tokens - 1) // PAGE)
    heard: dict[str, list[Heard]] = {}
    with tempfile.TemporaryDirectory(prefix="quire-prefix-") as folder, redis_process() as redis:
        below = {"disk": (f"--disk-path={folder}/pages",)} | ({"redis": (f"--redis-url={redis}",)} if redis else {})
        flags = (_RAM, *(flag for each in below.values() for flag in each))
        with PrefixStack(model, 512 << 20, flags) as stack:
            for prompt in warm_up:
                stack.ask(prompt, 1)
            before = stack.count("kvstore", "tier_stored_total", "ram")
            heard["nowhere"] = [stack.ask(prompt, 1) for prompt in asked]
            heard["device"] = [stack.ask(prompt, 1) for prompt in asked]
            stack.until_stored(int(before) + pages)
            for medium, where in (("ram", ()), *below.items()):
                if where:
                    stack.restart_kvstore(_RAM, *where)
                stack.forget_device()
                stack.ask(warm_up[0], 1)
                found = stack.count("kvstore", "tier_hits_total", medium)
                heard[medium] = [stack.ask(prompt, 1) for prompt in asked]
                found = stack.count("kvstore", "tier_hits_total", medium) - found
                if found < pages:
                    print(f"{medium}: {found:.0f} of {pages} pages came from there")
    met = _table(heard, prompts, tokens)
    if not redis:
        print("redis | not measured: redis-server is not installed")
    return met


def _table(heard: dict[str, list[Heard]], prompts: int, tokens: int) -> bool:
    print(
        f"\ntime to the first token of {prompts} prompts of {tokens} tokens, each alone, all their pages in one place"
    )
    print("pages are in | p50 ms | of cold | cached tokens, mean | where the time went, ms (median)")
    cold = statistics.median(one.ttft_ms for one in heard["nowhere"])
    met = True
    for place, answers in heard.items():
        wrong = [one.tokens for one in answers] != [one.tokens for one in heard["nowhere"]]
        if wrong:
            raise SystemExit(f"{place}: other tokens than without a cache")
        ttft = statistics.median(one.ttft_ms for one in answers)
        aim = _AIMS.get(place)
        met &= aim is None or ttft <= aim * cold
        wanted = f" (<= {aim})" if aim else ""
        cached = statistics.mean(one.cached_tokens for one in answers)
        print(f"{place} | {ttft:.1f} | {ttft / cold:.3f}{wanted} | {cached:.0f} | {phases(answers)}")
    return met


def phases(answers: list[Heard]) -> str:
    """Return medians of the times that the services report."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in answers:
        for timing in one.timings:
            spent[timing.service, timing.phase].append(timing.us / 1e3)
    medians = {name: statistics.median(each) for name, each in spent.items()}
    said = [f"{service}.{phase} {ms:.1f}" for (service, phase), ms in medians.items() if ms >= _LEAST_MS]
    return ", ".join(said)
