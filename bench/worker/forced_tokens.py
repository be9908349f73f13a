"""`python -m bench.worker.forced_tokens`: measures the gain of drafts of forced tokens on the CPU.

A scheduler core and a worker engine in one process answer requests with a JSON schema, and the matcher is the real
process. In one arm, a row samples one token in a step. In the other arm, forced tokens are drafts, so that a row
samples up to eight tokens. Both arms take turns, on the same model and with the same requests, and must give the same
answers. If the grammar allows any whitespace between the parts of JSON, few tokens are forced. If the grammar allows no
whitespace, the names of properties and the marks between them are forced.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from bench.harness.local_engine import LocalEngine
from quire.cli.output.terminal import table
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.structured.constraint import Constraint
from quire_worker.config import WorkerConfig
from quire_worker.matcher.matcher_factory import make_matcher
from quire_worker.matcher.step_masks import MAX_CONSTRAINED_ROW_TOKENS
from quire_worker.model_source import load_configured
from quire_worker.replica import ServedModel

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        "country_of_birth": {"type": "string", "maxLength": 8},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_a_member": {"type": "boolean"},
    },
    "required": ["temperature_unit", "country_of_birth", "number_of_children", "is_a_member"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, JsonCompileOptions | None] = {
    "any whitespace": None,
    "no whitespace": {"whitespace_flexible": False},
}


def main() -> int:
    """Run the benchmark. Returns 0 if both arms give the same answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="requests that run together")
    parser.add_argument("--answers", type=int, default=16, help="answers of each request, one after the other")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = WorkerConfig(model=arguments.model, device="cpu")
    served = load_configured(config, lambda *progress: None)
    rows, wrong = [], 0
    for name, options in GRAMMARS.items():
        text = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), options)
        for requests in arguments.requests:
            rates: dict[int, list[float]] = {1: [], MAX_CONSTRAINED_ROW_TOKENS: []}
            for number in range(arguments.rounds):
                answers = {}
                for row_tokens, found in rates.items():
                    rate, answers[row_tokens] = run(config, served, row_tokens, text, requests, arguments.answers)
                    found.append(rate)
                wrong += answers[1] != answers[MAX_CONSTRAINED_ROW_TOKENS]
                print(f"{name}, {requests} requests, round {number + 1}: {_show(rates)}", file=sys.stderr)
            ratios = [many / one for one, many in zip(*rates.values(), strict=True)]
            medians = [f"{statistics.median(found):.0f}" for found in rates.values()]
            rows.append([name, str(requests), *medians, f"{statistics.median(ratios):.2f}"])
    print(table(["grammar", "requests", "tokens/s", "with drafts", "ratio"], rows, right=range(1, 5)))
    print("the answers are the same" if not wrong else f"{wrong} rounds gave other answers")
    return 1 if wrong else 0


def run(
    config: WorkerConfig, served: ServedModel, row_tokens: int, text: str, requests: int, answers: int
) -> tuple[float, list[list[int]]]:
    """Answer the requests by rows of at most `row_tokens` tokens. Returns tokens per second, and the tokens of each
    answer. The first answer of each request, in whose time the matcher starts, does not count."""
    matcher = make_matcher(config, config.model, served.info, "cpu", row_tokens)
    local = LocalEngine(replace(served, max_constrained_row_tokens=row_tokens), max_num_seqs=requests, matcher=matcher)
    try:
        began, tokens, found = 0.0, 0, []
        for turn in range(1 + answers):
            if turn == 1:
                began = time.perf_counter()
            for index in range(requests):
                sampling = Sampling(temperature=1.0, seed=1000 * turn + index)
                prompt = np.arange(10, 40, dtype=np.int32)
                stop = Stop(max_tokens=200)
                sequence = Sequence(prompt, stop, sampling=sampling, constraint=Constraint.of(text))
                local.submit(requests * turn + index, sequence)
            answered = local.run()
            if turn:
                ended = [answered[requests * turn + index].tokens for index in range(requests)]
                found += ended
                tokens += sum(map(len, ended))
        return tokens / (time.perf_counter() - began), found
    finally:
        local.close()
        matcher.close()


def _show(rates: dict[int, list[float]]) -> str:
    return ", ".join(f"{found[-1]:.0f} tokens/s with {row_tokens}" for row_tokens, found in rates.items())


if __name__ == "__main__":
    sys.exit(main())
