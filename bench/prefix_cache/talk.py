"""Runs conversations through five services, and measures by the services' own counters how much prefill the prefix
cache and the tiers save.

In every run, the same users send the same messages, one after the other, and sampling is greedy. So all runs must give
the same tokens. The upper bounds of hits are computed by bench.prefix_cache.bounds from these conversations.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.kvstore.floor import redis_process
from bench.prefix_cache.bounds import Visit, knowing_the_future, never_evicting
from bench.prefix_cache.conversations import Conversations, Shape
from bench.prefix_cache.stack import PrefixStack
from quire_common.pages import chain_hashes

PAGE = 16
# Ids that are no special tokens of the demo model.
VOCAB = (300, 4000)
LEAST_OF_ORACLE = 0.97
LEAST_OF_OPTIMAL = 0.85
# On a device that has room for so many of the longest conversation, others leave between two turns of a user.
_CROWDED = 1.5


class Setting(NamedTuple):
    """`pages` on the device; `kvstore` are its flags, None for no kvstore."""

    name: str
    pages: int
    kvstore: tuple[str, ...] | None = None
    scheduler: tuple[str, ...] = ()


@dataclass
class Talk:
    """One run."""

    setting: Setting
    visits: list[Visit]
    answers: list[list[int]]
    first_ms: list[float]
    later_ms: list[float]
    """Of turns after a user's first."""
    local: float = 0.0
    fetched: float = 0.0
    computed: float = 0.0
    """Pages of prompts, and tokens, by the scheduler's counters."""


def conversations(model: Path, shape: Shape, seed: int) -> bool:
    """Print the table. Returns whether all targets are met."""
    with tempfile.TemporaryDirectory(prefix="quire-prefix-") as folder, redis_process() as redis:
        plenty, page_bytes = _most_pages(shape), _page_bytes(model)
        cold = talk(model, shape, page_bytes, seed, Setting("no cache", plenty, None, ("--no-enable-prefix-caching",)))
        distinct = len({page for visit in cold.visits for page in visit.left})
        longest = max(visit.needed for visit in cold.visits)
        crowded = int(_CROWDED * longest)
        small = f"--ram-bytes={4 * longest * page_bytes}"
        settings = [
            Setting("device, enough", distinct + longest),
            Setting("device, half", distinct // 2),
            Setting("device, crowded", crowded),
            Setting("crowded, kvstore in RAM", crowded, ("--ram-bytes=1073741824",)),
            Setting("crowded, kvstore on disk", crowded, (small, f"--disk-path={folder}/pages")),
        ]
        if redis:
            settings.append(Setting("crowded, kvstore in Redis", crowded, (small, f"--redis-url={redis}")))
        print(
            f"\n{shape.users} users x {shape.turns} turns, {shape.system} tokens said to all, {distinct} distinct pages"
        )
        print("setting | pages | TTFT p50 of first turns, of later ones, ms | later of cold", end=" | ")
        print("hit rate, device + kvstore | share of the bound | tokens computed")
        met = _row(cold, cold)
        for setting in settings:
            met &= _row(talk(model, shape, page_bytes, seed, setting), cold)
    if not redis:
        print("crowded, kvstore in Redis | not measured: redis-server is not installed")
    return met


def talk(model: Path, shape: Shape, page_bytes: int, seed: int, setting: Setting) -> Talk:
    """Run all turns of all users."""
    run = Talk(setting, [], [], [], [])
    said, spoken = Conversations(shape, VOCAB, seed), set[int]()
    # The first page of the pool is nobody's.
    with PrefixStack(model, (setting.pages + 1) * page_bytes, setting.kvstore, setting.scheduler) as stack:
        stack.ask([5] * PAGE, 2)
        if int(stack.count("scheduler", "pages")) != setting.pages:
            raise SystemExit(f"the device has {stack.count('scheduler', 'pages')} pages, not {setting.pages}")
        before = _counters(stack)
        for user, prompt in said.turns():
            heard = stack.ask(prompt, shape.answer)
            said.answered(user, heard.tokens)
            run.answers.append(heard.tokens)
            (run.later_ms if user in spoken else run.first_ms).append(heard.ttft_ms)
            spoken.add(user)
            whole = np.array([*prompt, *heard.tokens[:-1]], np.int32)
            hashes = tuple(chain_hashes(whole, PAGE))
            wanted = hashes[: (len(prompt) - 1) // PAGE]
            run.visits.append(Visit(wanted, hashes, -(-len(whole) // PAGE), heard.cached_tokens // PAGE))
        run.local, run.fetched, run.computed = (a - b for a, b in zip(_counters(stack), before, strict=True))
    return run


def _counters(stack: PrefixStack) -> tuple[float, float, float]:
    by_source = [stack.count("scheduler", "prompt_tokens_by_source_total", s) for s in ("local_hit", "kvstore_hit")]
    return by_source[0] / PAGE, by_source[1] / PAGE, stack.count("scheduler", "prefill_tokens_total")


def _page_bytes(model: Path) -> int:
    """Return the bytes of a page as the CPU worker lays it out: float32, all layers."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 4 * 2 * PAGE * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def _most_pages(shape: Shape) -> int:
    longest = shape.system + shape.turns * (shape.most_message + shape.answer)
    return -(-longest // PAGE)


def _row(run: Talk, cold: Talk) -> bool:
    if run.answers != cold.answers:
        raise SystemExit(f"{run.setting.name}: other tokens than without a cache")
    wanted = sum(len(visit.wanted) for visit in run.visits)
    oracle, optimal = never_evicting(run.visits), knowing_the_future(run.visits, run.setting.pages)
    met, bound = True, "-"
    rate = (run.local + run.fetched) / wanted
    if run.setting.kvstore is not None:
        bound = f"{rate * wanted / oracle:.3f} of never evicting"
    elif run.setting.name == "device, enough":
        met = run.local >= LEAST_OF_ORACLE * oracle
        bound = f"{run.local / oracle:.4f} of never evicting (>= {LEAST_OF_ORACLE})"
    elif run is not cold:
        met = run.local >= LEAST_OF_OPTIMAL * optimal
        bound = f"{run.local / optimal:.4f} of knowing the future (>= {LEAST_OF_OPTIMAL})"
    first, later = statistics.median(run.first_ms), statistics.median(run.later_ms)
    share = later / statistics.median(cold.later_ms)
    rates = f"{run.local / wanted:.4f} + {run.fetched / wanted:.4f}"
    times = f"{first:.0f}, {later:.0f} | {share:.3f}"
    print(f"{run.setting.name} | {run.setting.pages} | {times} | {rates} | {bound} | {run.computed:.0f}", flush=True)
    return met
