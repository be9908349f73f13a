"""A part of stage 3: measures the cost of grammars in time between tokens, when every sequence has one
(`bench.gpu.grammars`).

Scheduler core, engine and GPU are in one process, as in `bench.gpu.engine`, and the matcher is a real process. The same
number of sequences is served alternately with a grammar for each and without. A row is held if its mask comes late, so
the figure is the time per token of each request. Weights are random. The tokenizer is made up: a byte-level one with as
many tokens as the model has. The grammar is JSON with a long string, which allows most tokens.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import string
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from pathlib import Path
from statistics import median

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.gpu.engine import Local, worker_config
from bench.gpu.figures import OVER_FREE
from bench.gpu.record import Recorder
from bench.gpu.shapes import MODELS, SHAPES
from bench.gpu.table import has_gpu, measured_in_process
from quire_common.sequence import Sampling
from quire_common.structured.constraint import Constraint
from quire_common.telemetry import metrics
from quire_worker.matcher.matcher_factory import make_matcher
from quire_worker.model_source import load_configured

_RECORD = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: record{{1000}}\nrecord: %json {json.dumps(_RECORD)}\n"
_PROMPT, _OUTPUT, _TURNS = 128, 128, 3
_END = "<end>"


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Measure both shapes; with `tiny` only the small one; without a GPU a tiny shape."""
    names, options = [*SHAPES][: 1 if tiny else None], list[str]()
    if not has_gpu():
        names, options = ["tiny"], ["--batches", "4", "--output", "12"]
    for name in names:
        report(recorder, measured_in_process(recorder, name, options, "bench.gpu.grammars", "with grammars"))


def report(recorder: Recorder, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Report a line for each number of sequences, with the figures to compare."""
    for row, measured in figures.items():
        target = OVER_FREE.get(row.partition(" ")[2])
        beside = {} if target is None else target.beside(measured["percent"])
        recorder.figure(row, **measured, **beside)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of this many tokens into a model's folder: bytes, then short strings of letters, and
    one token that ends an answer. A smaller vocabulary has fewer bytes."""
    letters = string.ascii_lowercase
    more = ("".join(each) for size in itertools.count(2) for each in itertools.product(letters, repeat=size))
    alphabet = sorted(ByteLevel.alphabet(), key=lambda each: (each not in letters + 'Ġ[]",', each))
    tokens = list(itertools.islice(itertools.chain(alphabet, more), vocab_size - 1))
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))


def measure(name: str, batches: Listed[int], output: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (model and row, figures) for each number of sequences."""
    with tempfile.TemporaryDirectory() as folder:
        config = worker_config(Path(folder), name, max(batches), 0, eager=False)
        write_tokenizer(Path(config.model), MODELS[name].vocab_size)
        served = load_configured(config, lambda *_: None)
        matcher = make_matcher(config, config.model, served.info, served.device)
        local = Local(served, max(batches), matcher)
        while local.device.prepare():
            pass
        constraint = Constraint.of(GRAMMAR)
        for batch in batches:
            found = dict[bool, list[dict[str, float]]]()
            for turn in range(1 + _TURNS):
                for constrained in (False, True):
                    before, held = matcher.mask_totals, held_rows()
                    asked = constraint if constrained else None
                    figures = local.serve([_PROMPT] * batch, [output] * batch, Sampling(), asked)
                    made, spent_ns = (after - b for after, b in zip(matcher.mask_totals, before, strict=True))
                    figures["mask_us"] = spent_ns / max(1, made) / 1e3
                    figures["held_percent"] = 100 * (held_rows() - held) / (batch * output)
                    if turn:  # the first is for warming up
                        found.setdefault(constrained, []).append(figures)
            free, rows = (median(each["tpot_ms"] for each in found[which]) for which in (False, True))
            yield (
                f"{name} grammars {batch}",
                {
                    "tpot_ms": rows,
                    "free_tpot_ms": free,
                    "percent": 100 * (rows / free - 1),
                    "held_percent": median(each["held_percent"] for each in found[True]),
                    "mask_us": median(each["mask_us"] for each in found[True]),
                },
            )
        local.device.close()
        matcher.close()


def held_rows() -> float:
    """Return the number of rows that were held so far."""
    return metrics.registry.get_sample_value("quire_worker_held_rows_total") or 0.0


def main(argv: Listed[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 128], help="numbers of sequences")
    parser.add_argument("--output", type=int, default=_OUTPUT, help="tokens of each")
    parser.add_argument("--out", type=Path, help="file for the figures, written anew with each row")
    args = parser.parse_args(argv)
    result: dict[str, dict[str, float]] = {}
    for name in args.models:
        for title, figures in measure(name, args.batches, args.output):
            print(f"{title}: " + " ".join(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)
            result[title] = figures
            if args.out:
                args.out.write_text(json.dumps(result))
        gc.collect()  # frees the model's pages, which captured graphs hold in cycles of references
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
