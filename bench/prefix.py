"""How much of the prompts of conversations the prefix cache spares: python -m bench.prefix [--ttft]

Hit rates are counted, not timed: a scheduler core and a worker engine with a made-up model, one request after the
other, against a cache that never evicts, and against one of the same size that knows the future. `--ttft` measures, on
the demo model in this process, the time to the first token of prompts that are new and of those served before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from bench.cache_bounds import Visit, knowing_the_future, never_evicting
from bench.conversations import Conversations, Shape
from bench.paced_replica import PacedReplica
from quire_common.pages import chain_hashes
from quire_common.sequence import Sequence, Stop

PAGE = 16
LEAST_OF_ORACLE = 0.97
LEAST_OF_OPTIMAL = 0.85
MOST_WARM = 0.25
_DEMO = Path(__file__).parents[1] / "models" / "demo"


def visits_with(shape: Shape, num_pages: int, seed: int, **scheduler: object) -> tuple[list[Visit], int]:
    """Serve the conversations on so many pages: what each request found, and the tokens that were computed."""
    replica = PacedReplica(num_pages + 1, PAGE, **scheduler)
    talk = Conversations(shape, (3, replica.facts.vocab_size), seed)
    visits = []
    for user, prompt in talk.turns():
        sequence = Sequence(np.array(prompt, np.int32), Stop(shape.answer, ignore_eos=True))
        tokens, cached = replica.serve(sequence)
        talk.answered(user, tokens)
        whole = np.array([*prompt, *tokens[:-1]], np.int32)
        hashes = tuple(chain_hashes(whole, PAGE))
        visits.append(Visit(hashes[: (len(prompt) - 1) // PAGE], hashes, -(-len(whole) // PAGE), cached // PAGE))
    return visits, replica.scheduler.stats.prefill_tokens


def rates(shape: Shape, seed: int) -> bool:
    """Print the table; whether all aims are met."""
    visits, _ = visits_with(shape, 64_000, seed)
    distinct = len({page for visit in visits for page in visit.left})
    enough = distinct + max(visit.needed for visit in visits)
    _, uncached = visits_with(shape, enough, seed, enable_prefix_caching=False)
    print(f"{shape.users} users x {shape.turns} turns, {distinct} pages of {PAGE}; without a cache {uncached} tokens")
    print("pages | hit rate | never evicting | knowing the future | share of the bound | tokens computed")
    met = True
    for name, pages, least in (("enough", enough, LEAST_OF_ORACLE), ("half", distinct // 2, LEAST_OF_OPTIMAL)):
        visits, computed = visits_with(shape, pages, seed)
        wanted = sum(len(visit.wanted) for visit in visits)
        hits = sum(visit.hits for visit in visits)
        oracle, optimal = never_evicting(visits), knowing_the_future(visits, pages)
        share = hits / (oracle if name == "enough" else optimal)
        met &= share >= least
        columns = (
            f"{hits / wanted:.4f}",
            f"{oracle / wanted:.4f}",
            f"{optimal / wanted:.4f}",
            f"{share:.4f} (>= {least})",
        )
        print(" | ".join((f"{pages} ({name})", *columns, str(computed))))
    return met


def ttft(prompts: int, tokens: int) -> bool:
    """Cold and warm first tokens of the demo model; whether warm is as much faster as wanted."""
    from bench.local_engine import LocalEngine, load

    model = load(_DEMO)
    local = LocalEngine(model, max_num_seqs=8)
    rng, times = np.random.default_rng(0), {"cold": list[float](), "warm": list[float]()}
    for index in range(prompts + 1):
        prompt = rng.integers(300, 1000, tokens).astype(np.int32)
        for kind, handle in (("cold", 2 * index), ("warm", 2 * index + 1)):
            began = time.perf_counter()
            local.submit(handle, Sequence(prompt, Stop(1, ignore_eos=True)))
            local.run()
            # The first prompt pays for what is compiled or allocated late.
            if index:
                times[kind].append((time.perf_counter() - began) * 1000)
    local.check_quiet()
    cold, warm = (statistics.median(times[kind]) for kind in ("cold", "warm"))
    print(f"time to first token, {tokens} tokens, p50 of {prompts}: cold {cold:.1f} ms, on the device {warm:.1f} ms")
    print(f"warm is {warm / cold:.3f} of cold (<= {MOST_WARM})")
    return warm <= MOST_WARM * cold


def main() -> int:
    """0 where all aims are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=1024, help="tokens of the shared system prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft", action="store_true", help="measure times too, on the demo model")
    args = parser.parse_args()
    met = rates(Shape(args.users, args.turns, args.system), args.seed)
    if args.ttft:
        met &= ttft(prompts=10, tokens=args.system)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
