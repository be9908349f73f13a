"""Load on a running server over HTTP, streaming, with vLLM's flags, table and JSON.

Works with any server that speaks OpenAI's API: random prompts and those of a trace are token ids, so that no tokenizer
is needed and lengths are exact. For chat they are words, of approximate length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.cli.benches.results import stamp, write_result
from quire.request_parameters import BENCH_FLAGS

HELP = "load on a running server: throughput, TTFT, TPOT, ITL"
_DEFAULT_VOCABULARY = 32000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, by vLLM's names. Quire's own are `--name`, `--num-processes`, `--plot`, `--random-vocab-size`,
    `--custom-output-len` and the flags of the trace."""
    where = parser.add_argument_group("server")
    where.add_argument("--backend", choices=["openai", "openai-chat", "vllm", "quire"], default="openai")
    where.add_argument("--base-url", metavar="URL", help="(default: http://HOST:PORT, or the stack that runs here)")
    where.add_argument("--host", help="(default: the stack that runs here)")
    where.add_argument("--port", type=int, metavar="N", help="(default: 8000, with --host)")
    where.add_argument("--endpoint", metavar="PATH", help="(default: that of the backend)")
    where.add_argument("--name", default="default", help="stack to measure where no server is named")
    where.add_argument("--model", help="(default: the first that the server lists)")
    where.add_argument("--tokenizer", metavar="FOLDER", help="model's folder, to know its vocabulary's size")
    where.add_argument("--api-key", metavar="KEY", help="credential (default: the variable QUIRE_API_KEY)")
    where.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    where.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    where.add_argument("--ready-check-timeout-sec", type=float, default=600, metavar="S", help="wait for the server")
    what = parser.add_argument_group("requests")
    what.add_argument("--dataset-name", choices=["random", "trace", "custom"], default="random")
    what.add_argument("--dataset-path", metavar="FILE", help="JSON lines, for trace and custom")
    what.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="(default: %(default)s)")
    what.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    what.add_argument("--random-output-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    what.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths from 1-R to 1+R")
    what.add_argument("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all share")
    what.add_argument("--random-vocab-size", type=int, default=0, metavar="N", help="ids of prompts are below it")
    what.add_argument("--trace-speed", type=float, default=1.0, metavar="X", help="replay so much faster")
    what.add_argument("--max-input-len", type=int, default=0, metavar="N", help="cut a trace's prompts")
    what.add_argument("--max-output-len", type=int, default=0, metavar="N", help="cut a trace's answers")
    what.add_argument("--custom-output-len", type=int, default=256, metavar="N", help="(default: %(default)s)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    what.add_argument("--ignore-eos", action="store_true", help="every answer has its full length")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)")
    for parameter in BENCH_FLAGS:
        flag = "--" + parameter.name.replace("_", "-")
        what.add_argument(flag, type=int if parameter.kind == "int" else float, metavar="X")
    what.add_argument("--logprobs", type=int, metavar="N", help="ask for logprobs")
    what.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="fields of every request")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="per second (default: inf)")
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; inf: equal gaps (default: 1)"
    )
    load.add_argument("--max-concurrency", type=int, default=0, metavar="N", help="(default: no bound)")
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before the measurement")
    load.add_argument("--num-processes", type=int, default=1, metavar="N", help="that send load (default: 1)")
    out = parser.add_argument_group("result")
    out.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help="(default: %(default)s)")
    out.add_argument("--metric-percentiles", default="99", metavar="LIST", help="(default: %(default)s)")
    out.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el bounds")
    out.add_argument("--save-result", action="store_true", help="write JSON to --result-dir/--result-filename")
    out.add_argument("--save-detailed", action="store_true", help="with every request's figures")
    out.add_argument("--append-result", action="store_true", help="append a line instead of replacing the file")
    out.add_argument("--result-dir", default=".", metavar="FOLDER")
    out.add_argument("--result-filename", metavar="FILE")
    out.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result")
    out.add_argument("--label", metavar="TEXT", help="kept in the result")
    out.add_argument("--plot", metavar="FILE", help="draw latencies and throughput as SVG")
    out.add_argument("--disable-tqdm", action="store_true", help="accepted; there is no bar to disable")


def run(args: argparse.Namespace) -> int:
    """Send the first request until the server answers it, then send the load, and print vLLM's table. Requests are sent
    at the times of --request-rate if it is given, or else of the data set; without either, all at once, as far as
    --max-concurrency allows. Flags may ask for warm-up requests before, which repeat the load's own prompts all at
    once, a result file and an SVG plot. Returns the exit code: 1 if no request succeeded. Raises InvalidArgument for
    bad flags or a malformed data set, NotFound for one that cannot be read, Unavailable if the server does not answer
    or fails the first request, and FailedPrecondition if no server is named and no stack runs, or if a file of the
    result, which is printed before, cannot be written."""
    from quire.bench.load import PlannedRequest, arrivals
    from quire.bench.load_processes import run_load
    from quire.bench.plot import serving_charts
    from quire.bench.server_facts import wait_ready
    from quire.bench.serving_report import make_report, render_report
    from quire.cli.benches.serve_options import make_options, make_requests, make_target

    options = make_options(args)
    target, facts = make_target(args)
    requests = make_requests(args, facts.vocabulary or _DEFAULT_VOCABULARY, chat=target.chat)
    wait_ready(target, requests[0], args.ready_check_timeout_sec)
    times = [r.arrival_s for r in requests if r.arrival_s is not None]
    if not times or args.request_rate != float("inf"):
        times = arrivals(len(requests), args.request_rate, args.burstiness, args.seed)
    plan = [
        PlannedRequest(i, at_s, target.request(request.prompt, request.output_len, f"bench-{args.seed}-{i}"))
        for i, (request, at_s) in enumerate(zip(requests, times, strict=True))
    ]
    if args.num_warmups:
        warm = [PlannedRequest(i, 0.0, plan[i % len(plan)].body) for i in range(args.num_warmups)]
        run_load(target, warm, max_concurrency=args.max_concurrency, processes=args.num_processes)
    begin_s, outcomes = run_load(target, plan, max_concurrency=args.max_concurrency, processes=args.num_processes)
    report: dict[str, Any] = {
        "date": stamp(),
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model,
        "tokenizer_id": args.tokenizer or target.model,
        "num_prompts": len(plan),
        "request_rate": _in_json(args.request_rate),
        "burstiness": _in_json(args.burstiness),
        "max_concurrency": args.max_concurrency or None,
        "num_processes": args.num_processes,
        **dict(item.partition("=")[::2] for item in args.metadata),
        **make_report(outcomes, begin_s, options),
    }
    print(render_report(report, options), flush=True)
    _save(args, report)
    if args.plot:
        title = f"{target.model}: {report['completed']} requests, {report['output_throughput']:.0f} output tokens/s"
        write_result(Path(args.plot), serving_charts(outcomes, begin_s, title))
    return 0 if report["completed"] else 1


def _json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a flag's text. Raises ValueError, which the parser shows as a wrong value, for another
    text."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _in_json(value: float) -> float | str:
    """Return the number, or `inf` as a text, because JSON has no infinity."""
    return "inf" if value == float("inf") else value


def _save(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the report as a line of JSON to the file of --result-dir and --result-filename, or append it; makes the
    folder if needed. Without a file name, the name is made of backend, rate, model and date. Does nothing unless
    --save-result, --append-result or --result-filename is given."""
    if not (args.save_result or args.append_result or args.result_filename):
        return
    model = str(report["model_id"]).rpartition("/")[2]
    rate = _in_json(args.request_rate)
    path = Path(args.result_dir) / (args.result_filename or f"{args.backend}-{rate}qps-{model}-{report['date']}.json")
    write_result(path, json.dumps(report) + "\n", append=args.append_result)
