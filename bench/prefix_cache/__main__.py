"""Measures how much prefill of conversations the prefix cache and the kvstore save: python -m bench.prefix_cache

The program prints three tables. The first one counts hits with a made-up model, of a scheduler core and a worker
engine, one request after the other. It compares them with a cache that never evicts, and with a cache of the same size
that knows the future. The second one has the time to the first token on the demo model through five services, by where
a prompt's pages are. The third one has the same conversations without a cache, on devices of three sizes, and with the
kvstore's tiers behind the smallest. Every answer must equal the one without a cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from bench import ROOT
from bench.harness.paced_replica import PacedReplica
from bench.prefix_cache.bounds import Visit, knowing_the_future, never_evicting
from bench.prefix_cache.conversations import Conversations, Shape
from bench.prefix_cache.media import first_tokens
from bench.prefix_cache.talk import conversations
from quire_common.pages import chain_hashes
from quire_common.sequence import Sequence, Stop

PAGE = 16
LEAST_OF_ORACLE = 0.97
LEAST_OF_OPTIMAL = 0.85
_PARTS = ("counts", "media", "talk")
_DEMO = ROOT / "models" / "demo"


def visits_with(shape: Shape, num_pages: int, seed: int, **scheduler: object) -> tuple[list[Visit], int]:
    """Serve the conversations with this many pages. Returns what each request found in the cache, and the number of
    computed tokens."""
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
    """Print the table. Returns whether all targets are met."""
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


def main() -> int:
    """Run the benchmark. Returns 0 if all targets are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_cache", description=__doc__)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=1024, help="tokens of the shared system prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--prompts", type=int, default=10, help="prompts whose first tokens are timed by where they are"
    )
    parser.add_argument("--model", type=Path, default=_DEMO, help="folder of the model that is timed")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="which of the tables to make")
    args = parser.parse_args()
    shape, met = Shape(args.users, args.turns, args.system, answer=args.answer), True
    if "counts" in args.parts:
        met &= rates(shape, args.seed)
    if "media" in args.parts:
        met &= first_tokens(args.model, args.prompts, args.system)
    if "talk" in args.parts:
        met &= conversations(args.model, shape, args.seed)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
