"""The five services beside a GPU, over HTTP: streaming completions at several concurrencies.

`python -m bench.gpu_serve` on the GPU: a model folder with the shape's config.json and random weights, prompts of token
ids, greedy, streamed as server-sent events by one load generator (a process of its own), with each service's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bench.gpu_shapes import SHAPES
from bench.services_arm import cpu_seconds
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire_worker.model.arch_spec import ArchSpec

THEIRS = {1: "13.2 / 1.61", 64: "160 / 3.3, 13632 tok/s", 256: "427 / 11.6, 16969 tok/s"}


def write_config(folder: Path, spec: ArchSpec, context: int) -> Path:
    """A folder that describes the shape, with no weights."""
    rope: dict[str, object] = {"rope_type": spec.rope.kind, "rope_theta": spec.rope.theta}
    if spec.rope.kind == "llama3":
        rope |= {
            "factor": spec.rope.factor,
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_max_positions,
        }
    fields = {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_parameters": rope,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    # A word for every id, so that every token of a random model is text and has an event of its own.
    tokenizer = Tokenizer(WordLevel({f"w{each}": each for each in range(spec.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def one(host: str, port: int, ids: list[int], output: int, gate: asyncio.Semaphore) -> tuple[float, float, int]:
    """TTFT, seconds from the first token to the last, events; over a connection of its own."""
    body = json.dumps(
        {"model": "m", "prompt": ids, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    async with gate:
        reader, writer = await asyncio.open_connection(host, port)
        begin = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        first = last = 0.0
        events = 0
        while chunk := await reader.read(65536):
            seen = chunk.count(b"data: {")
            if seen:
                last = time.perf_counter()
                first = first or last
                events += seen
        writer.close()
        if not first:
            raise RuntimeError("no token came")
        return first - begin, last - first, events


async def load(
    host: str, port: int, vocab: int, prompt: int, output: int, streams: int, count: int, seed: int = 0
) -> dict[str, float]:
    """`count` requests, at most `streams` open at once."""
    rng = np.random.default_rng([seed, streams])
    gate = asyncio.Semaphore(streams)
    prompts = [rng.integers(0, vocab, prompt).tolist() for _ in range(count)]
    begin = time.perf_counter()
    found = await asyncio.gather(*(one(host, port, ids, output, gate) for ids in prompts))
    took = time.perf_counter() - begin
    ttft, rest, _ = (np.array(column) for column in zip(*found, strict=True))
    return {
        "output_tok_s": count * output / took,
        "ttft_p50_ms": float(np.median(ttft) * 1e3),
        "ttft_p99_ms": float(np.percentile(ttft, 99) * 1e3),
        "tpot_p50_ms": float(np.median(rest) / (output - 1) * 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--stores", action="store_true", help="let prompts' pages go to the kvstore")
    parser.add_argument("--client", nargs=2, default=None, metavar=("PORT", "STREAMS"), help="be the load generator")
    args = parser.parse_args()
    spec = SHAPES[args.model]
    vocab = spec.vocab_size
    if args.client:
        port, streams = map(int, args.client)
        count = max(16, 4 * streams)
        asyncio.run(load("127.0.0.1", port, vocab, args.prompt, args.output, streams, min(2 * streams, 64), seed=1))
        print(json.dumps(asyncio.run(load("127.0.0.1", port, vocab, args.prompt, args.output, streams, count))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "m", spec, 8192)
        scheduler: dict[str, str | bool] = {"enable-prefix-caching": False}
        flags: dict[str, dict[str, str | bool]] = {
            "worker": {"device": "cuda", "load-format": "dummy", "served-model-name": "m"},
            "scheduler": scheduler if args.stores else scheduler | {"kvstore-min-tokens": "1000000"},
            "router": {"max-concurrent-requests": "4096"},
        }
        begin = time.perf_counter()
        with contextlib.closing(LocalStack(StackSpec("gpu-serve", str(model), flags=flags))) as stack:
            print(f"{args.model}: five services serve after {time.perf_counter() - begin:.1f} s", flush=True)
            port = int(stack.ready.http.rsplit(":", 1)[1])
            for streams in args.concurrency:
                before, start = cpu_seconds(stack), time.perf_counter()
                command = [sys.executable, "-m", "bench.gpu_serve", "--model", args.model, "--client"]
                sizes = ["--prompt", str(args.prompt), "--output", str(args.output)]
                done = subprocess.run([*command, str(port), str(streams), *sizes], stdout=subprocess.PIPE, check=True)
                figures = json.loads(done.stdout)
                took, after = time.perf_counter() - start, cpu_seconds(stack)
                cores = {name: round((after[name] - before[name]) / took, 2) for name in after}
                text = " ".join(f"{key} {value:.2f}" for key, value in figures.items())
                print(f"{args.model} x{streams}: {text} (vLLM {THEIRS.get(streams)}) cores {cores}", flush=True)


if __name__ == "__main__":
    main()
