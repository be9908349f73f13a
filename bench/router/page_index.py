"""`python -m bench.router.page_index`: measures the cost of the router's page index, compared with a plain dictionary
of the same pages.

There are a million pages over a hundred holders: conversations with a shared system prompt, each page held by one to
three holders. A prefix of 128k tokens is 2,048 pages of 64 tokens, whose hashes are given. Hashing is measured
separately.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.pages import PageExtras, chain_hashes
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_keys import page_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMESPACE = hashlib.sha256(b"bench").digest()
PAGE = 64
LONGEST = 2048
SYSTEM_PAGES = 16


def fake_chain(rng: np.random.Generator, pages: int) -> list[bytes]:
    """Return hashes of uniform random bytes. A million real hashes would take longer than the benchmark."""
    data = rng.bytes(32 * pages)
    return [data[i : i + 32] for i in range(0, len(data), 32)]


def percentiles(seconds: list[float]) -> str:
    p50, p99, worst = np.percentile(np.array(seconds) * 1e6, [50, 99, 100])
    return f"p50 {p50:7.0f} us   p99 {p99:7.0f} us   worst {worst:7.0f} us"


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - a file of the kernel's, read in one go
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--holders", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)

    before = resident_bytes()
    directory = PageDirectory(options.pages, 10.0)
    holders = [directory.open() for _ in range(options.holders)]
    system = fake_chain(rng, SYSTEM_PAGES)
    chains: list[tuple[list[bytes], NDArray[np.intp]]] = []
    adds = []
    while len(directory.reported) < options.pages - LONGEST:
        # Conversations of 1k to 16k tokens, and now and then one of 128k.
        pages = LONGEST - SYSTEM_PAGES if rng.random() < 0.02 else int(rng.integers(16, 256))
        chain = system + fake_chain(rng, pages)
        having = rng.choice(options.holders, size=int(rng.integers(1, 4)), replace=False)
        for rank, holder in enumerate(having):
            # Who got it later has less of it.
            keys = page_keys(NAMESPACE, 0, chain[: len(chain) >> rank])
            start = time.perf_counter()
            directory.add(holders[holder], keys)
            adds.append(time.perf_counter() - start)
        chains.append((chain, having))
    grown = resident_bytes() - before
    kept = sum(len(chain) * 81 for chain, _ in chains)  # the benchmark's own hashes
    count = len(directory.reported)
    print(
        f"{count:,} pages of {options.holders} holders, {directory.reported.distinct_sets:,} distinct sets of holders"
    )
    print(f"memory: {directory.reported.nbytes / count:.1f} bytes a page in the table of told pages, ", end="")
    print(
        f"{directory.nbytes / count:.1f} with expected ones, {max(grown - kept, 0) / count:.0f} as the system sees it"
    )
    print(f"add, {np.mean([len(chain) for chain, _ in chains]):.0f} pages on average: {percentiles(adds)}")

    long = [chain for chain, _ in chains if len(chain) == LONGEST]
    cold = [fake_chain(rng, LONGEST) for _ in range(20)]
    warm_start = [system + fake_chain(rng, LONGEST - SYSTEM_PAGES) for _ in range(20)]
    failed = False
    for name, some in (("held", long), ("system prompt held", warm_start), ("held by nobody", cold)):
        order = rng.integers(0, len(some), options.rounds).tolist()
        times = []
        for i in order:
            start = time.perf_counter()
            depths = directory.prefixes([page_keys(NAMESPACE, 0, some[i])], 0.0).depths
            times.append(time.perf_counter() - start)
        deepest = int(depths.max())
        failed |= float(np.percentile(times, 99)) >= 1e-3
        print(f"lookup of {LONGEST} pages, {name:18} (deepest {deepest:4}): {percentiles(times)}")

    twin: dict[bytes, int] = {}
    for chain, having in chains:
        for rank, holder in enumerate(having.tolist()):
            for digest in chain[: len(chain) >> rank]:
                twin[digest] = twin.get(digest, 0) | 1 << holder
    times = []
    for i in rng.integers(0, len(long), options.rounds).tolist():
        start = time.perf_counter()
        alive = -1
        for digest in long[i]:
            alive &= twin.get(digest, 0)
            if not alive:
                break
        times.append(time.perf_counter() - start)
    size = sys.getsizeof(twin) / len(twin) + sys.getsizeof(long[0][0])
    print(f"the same, held, from a dictionary of {size:.0f} bytes a page: {percentiles(times)}")

    tokens = rng.integers(0, 100_000, LONGEST * PAGE).astype(np.int32)
    extras = PageExtras(salt="tenant")
    for page_size in (64, 16):
        times = []
        for _ in range(max(options.rounds // 50, 5)):
            start = time.perf_counter()
            chain_hashes(tokens, page_size, extras)
            times.append(time.perf_counter() - start)
        print(f"hash chain of {len(tokens) // 1024}k tokens, pages of {page_size}: {percentiles(times)}")
    times = []
    for chain, having in chains[: options.rounds]:
        keys = page_keys(NAMESPACE, 0, chain[-8:])
        start = time.perf_counter()
        directory.remove(holders[int(having[0])], keys)
        directory.add(holders[int(having[0])], keys)
        times.append(time.perf_counter() - start)
    print(f"an event of 8 pages removed and one of 8 stored: {percentiles(times)}")
    directory.close(holders[0])
    steps, start = [], time.perf_counter()
    for _ in directory.sweep():
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
    print(f"a holder forgotten, {len(steps)} steps: {percentiles(steps)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
