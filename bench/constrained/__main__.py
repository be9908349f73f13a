"""`python -m bench.constrained`: measures the effect of rows with grammars on the other rows, and the time that masks
and grammars take.

An engine with paced steps runs 64 rows, alternately without grammars and with grammars on 16 of them. The matcher is
the real process. There is no scheduler and no router, which would also use the cores. The benchmark compares the rows
without a grammar: their tokens per second, and the gaps between their tokens. Then it measures, in this process, the
time that llguidance itself takes for the same tokens, and to compile 100 schemas. --log adds an entry to bench/LOG.md.
On a busy machine other programs also cause gaps, so compare the arms with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from llguidance import LLMatcher

from bench import LOG
from bench.constrained.constrained_engine import ConstrainedEngine, Measured, Rows
from bench.harness.bench_log import BenchLog, LogEntry
from quire.bench.statistics import percentile
from quire.cli.output.terminal import table
from quire.models import find_model
from quire_worker.matcher.guidance_backend import GuidanceBackend
from quire_worker.matcher.vocabulary import load_vocabulary
from quire_worker.paced.facts import read_facts

PREDICTION = (
    "rows without a grammar lose < 3 % of throughput and < 5 % of the median gap, and their p99 gap is less than one "
    "step longer; held rows < 2 %; a mask takes < 200 us, < 2 times llguidance's own time"
)
_SCHEMAS = 100


def a_schema(number: int) -> str:
    """Return a grammar of a thousand records with its own names, which is longer than any run."""
    record = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string"},
            f"count{number}": {"type": "integer"},
            f"kind{number}": {"enum": ["a", "bc", f"def{number}"]},
            f"tags{number}": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "minItems": 1},
        },
        "required": [f"name{number}", f"count{number}", f"kind{number}", f"tags{number}"],
        "additionalProperties": False,
    }
    return f"start: record{{1000}}\nrecord: %json {json.dumps(record)}\n"


def main() -> int:
    """Run the benchmark. Returns 0 if the rows without a grammar keep their pace."""
    arguments = _parser().parse_args()
    model = str(find_model(None))
    found: dict[int, list[Measured]] = {0: [], arguments.constrained: []}
    for number in range(arguments.rounds):
        for constrained, results in found.items():
            rows = Rows(arguments.rows - constrained, constrained, arguments.step_ms, arguments.tokens)
            engine = ConstrainedEngine(model, rows, a_schema(0))
            try:
                results.append(engine.run(number))
            finally:
                engine.close()
            print(f"round {number + 1}, {constrained} of {arguments.rows}: {_show(results[-1])}", file=sys.stderr)
    plain, beside = (_middle(results, arguments.rows - count) for count, results in found.items())
    own_us = _own_us(model, found[arguments.constrained][-1].outputs)
    compile_ms = _compile_ms(model)
    held = statistics.median(each.held for each in found[arguments.constrained])
    mask_us = statistics.median(each.mask_us for each in found[arguments.constrained])
    lost, slower = 1 - beside[0] / plain[0], beside[1] / plain[1] - 1
    print(
        table(
            ["arm", "tokens/s of a row", "gap p50 ms", "gap p99 ms"],
            [[name, *(f"{value:.2f}" for value in values)] for name, values in (("none", plain), ("beside", beside))],
            right=range(1, 4),
        )
    )
    result = (
        f"throughput -{100 * lost:.2f} %, median gap {plain[1]:.3f} -> {beside[1]:.3f} ms ({100 * slower:+.2f} %), p99 "
        f"gap {plain[2]:.2f} -> {beside[2]:.2f} ms; held {100 * held:.2f} %; a mask {mask_us:.0f} us, llguidance's own "
        f"{own_us:.0f} us; compiling p50 / p99 {compile_ms[0]:.1f} / {compile_ms[1]:.1f} ms ({_SCHEMAS} schemas)"
    )
    print(result)
    if arguments.log:
        what = (
            f"`bench.constrained`: {arguments.rows} rows of {arguments.step_ms:g} ms steps, {arguments.constrained} "
            f"with a schema, {arguments.rounds} rounds of {arguments.tokens} tokens, demo vocabulary (4,096 tokens)"
        )
        machine = f"{os.cpu_count()} vCPU, load average {os.getloadavg()[0]:.0f}"
        BenchLog(LOG).put(LogEntry(what, PREDICTION, result, machine))
    longer_ms = beside[2] - plain[2]
    return 0 if lost < 0.03 and slower < 0.05 and longer_ms < arguments.step_ms and held < 0.02 else 1


def _show(measured: Measured) -> str:
    gaps = sorted(measured.gaps_ms)
    return (
        f"{measured.tokens_per_s:.0f} tokens/s, gap p50 {percentile(gaps, 50):.3f}, p99 {percentile(gaps, 99):.2f} ms, "
        f"held {100 * measured.held:.2f} %, mask {measured.mask_us:.0f} us"
    )


def _middle(results: list[Measured], free: int) -> tuple[float, float, float]:
    """Return the medians of the rounds: tokens per second of a row, and gaps."""
    gaps = [sorted(each.gaps_ms) for each in results]
    return (
        statistics.median(each.tokens_per_s / free for each in results),
        statistics.median(percentile(each, 50) for each in gaps),
        statistics.median(percentile(each, 99) for each in gaps),
    )


def _own_us(model: str, outputs: list[list[int]]) -> float:
    """Return the microseconds that llguidance takes for each of these tokens and the next mask."""
    facts = read_facts(model)
    tokenizer = load_vocabulary(Path(model), facts.vocab_size, facts.eos_token_ids)
    tokens = elapsed_ns = 0
    for output in outputs:
        matcher = LLMatcher(tokenizer, a_schema(0), log_level=0)
        matcher.compute_bitmask()
        began = time.perf_counter_ns()
        for token in output:
            matcher.consume_token(token)
            matcher.compute_bitmask()
        elapsed_ns += time.perf_counter_ns() - began
        tokens += len(output)
    return elapsed_ns / max(1, tokens) / 1e3


def _compile_ms(model: str) -> tuple[float, float]:
    """Return percentiles 50 and 99 of the time to compile a new schema and to make its first mask."""
    facts = read_facts(model)
    tokenizer = load_vocabulary(Path(model), facts.vocab_size, facts.eos_token_ids)
    backend = GuidanceBackend(tokenizer, facts.vocab_size, facts.eos_token_ids)
    found = []
    for number in range(_SCHEMAS):
        began = time.perf_counter()
        backend.compile_grammar(a_schema(number))[0].compute_mask()
        found.append((time.perf_counter() - began) * 1e3)
    found.sort()
    return percentile(found, 50), percentile(found, 99)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.constrained", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--constrained", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=1500, help="of each row without a grammar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", action="store_true", help="add an entry to bench/LOG.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
