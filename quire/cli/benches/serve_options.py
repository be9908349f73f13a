"""Checks the flags of `quire bench serve`, and converts them to the options of the benchmark."""

from __future__ import annotations

import argparse
from typing import Any

from quire.batch.base_url import parse_base_url
from quire.bench.datasets import BenchRequest, RandomLengths, custom_requests, random_requests, trace_requests
from quire.bench.server_facts import ServerFacts, find_facts, vocabulary_of
from quire.bench.serving_report import METRICS, ReportOptions
from quire.bench.target import ALIASES, BACKENDS, Target
from quire.channel import bearer
from quire.cli.arguments.connection import api_key
from quire.errors import FailedPrecondition, InvalidArgument
from quire.request_parameters import BENCH_FLAGS

_SAMPLING = (*(each.name for each in BENCH_FLAGS), "logprobs")


def make_options(args: argparse.Namespace) -> ReportOptions:
    """Check --num-prompts, --num-processes, --max-concurrency, the random lengths, the rates and the range ratio, and
    return the options of the report: metrics, percentiles, goodput limits, details. Raises InvalidArgument for one of
    these out of range (other counts are not checked), an unknown metric (for goodput: all but ttft, tpot and e2el), a
    percentile that is no number above 0 and up to 100, and a limit that is not a number."""
    for name in ("num_prompts", "random_input_len", "random_output_len", "num_processes"):
        if getattr(args, name) < 1:
            raise InvalidArgument("BAD_VALUE", f"--{name.replace('_', '-')} is less than 1.", "Give at least 1.")
    if args.max_concurrency < 0:
        raise InvalidArgument("BAD_VALUE", "--max-concurrency is less than 0.", "Give at least 1; 0 is no bound.")
    if not args.request_rate > 0 or not args.burstiness > 0 or not args.trace_speed > 0:
        raise InvalidArgument("BAD_VALUE", "A rate is not positive.", "Give more than 0.")
    if not 0 <= args.random_range_ratio < 1:
        raise InvalidArgument("BAD_VALUE", "--random-range-ratio is out of range.", "Give 0 up to, but not, 1.")
    metrics = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise InvalidArgument("BAD_VALUE", f"Unknown metric {unknown[0]!r}.", f"Known: {', '.join(METRICS)}.")
    try:
        percents = [float(text) for text in args.metric_percentiles.split(",")]
        goodput = {name: float(bound) for name, _, bound in (item.partition(":") for item in args.goodput)}
    except ValueError as error:
        raise InvalidArgument("BAD_VALUE", f"Not a number: {error}.", "Write 50,99 or ttft:200.") from error
    if not set(goodput) <= {"ttft", "tpot", "e2el"} or not all(0 < percent <= 100 for percent in percents):
        raise InvalidArgument("BAD_VALUE", "A bound or percentile is none.", "Write ttft:200, and percentiles to 100.")
    return ReportOptions(metrics, percents, goodput, args.save_detailed)


def make_target(args: argparse.Namespace) -> tuple[Target, ServerFacts]:
    """Return the target of the load, and the server's facts (vocabulary 0: unknown). The server is asked for the model,
    or for its vocabulary, if no flag gives it. For the vocabulary, --random-vocab-size wins over --tokenizer; among the
    fields of requests, --extra-body wins. Raises InvalidArgument for a malformed base URL, an API key that a header
    cannot hold, or a tokenizer's folder without its vocabulary's size. Raises Unavailable if a server that is asked
    does not answer, and FailedPrecondition if no server is named and no stack runs."""
    base_url = (args.base_url or _default_url(args)).rstrip("/").removesuffix("/v1")
    parse_base_url(base_url)  # a text that is no URL is refused before the server is asked
    headers = dict(item.partition("=")[::2] for item in args.header)
    key = api_key(args)
    if key:
        headers["Authorization"] = bearer(key)
    facts = ServerFacts(args.model or "", 0)
    if not args.model or not (args.random_vocab_size or args.tokenizer):
        found = find_facts(base_url, headers, args.ready_check_timeout_sec, insecure=args.insecure)
        facts = ServerFacts(args.model or found.model, found.vocabulary)
    vocabulary = args.random_vocab_size or (vocabulary_of(args.tokenizer) if args.tokenizer else facts.vocabulary)
    backend = ALIASES.get(args.backend, args.backend)
    body: dict[str, Any] = {"temperature": args.temperature}
    body |= {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos:
        body["ignore_eos"] = True
    chat = backend == "openai-chat"
    if chat and "logprobs" in body:
        body["top_logprobs"], body["logprobs"] = body["logprobs"], True
    target = Target(
        base_url,
        args.endpoint or BACKENDS[backend],
        chat,
        facts.model,
        headers,
        {**body, **args.extra_body},
        args.insecure,
    )
    return target, ServerFacts(facts.model, vocabulary)


def make_requests(args: argparse.Namespace, vocabulary: int, *, chat: bool) -> list[BenchRequest]:
    """Return the requests of the data set that the flags name: --num-prompts random or custom ones, or at most so many
    of a trace. Random prompts and those of a trace are token ids below `vocabulary`, or words for chat; custom prompts
    are sent as they are. Raises InvalidArgument for a missing, empty or malformed file, and NotFound for one that
    cannot be read."""
    if args.dataset_name == "random":
        lengths = RandomLengths(
            args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len
        )
        return random_requests(args.num_prompts, lengths, vocabulary, args.seed, words=chat)
    if not args.dataset_path:
        raise InvalidArgument("MISSING_DATASET", f"{args.dataset_name} needs a file.", "Give --dataset-path.")
    if args.dataset_name == "custom":
        return custom_requests(args.dataset_path, args.num_prompts, args.custom_output_len)
    requests = trace_requests(
        args.dataset_path,
        args.num_prompts,
        vocabulary,
        words=chat,
        speed=args.trace_speed,
        most_input=args.max_input_len,
        most_output=args.max_output_len,
    )
    if not requests:
        raise InvalidArgument("EMPTY_DATASET", f"{args.dataset_path} has no requests.", "Give another file.")
    return requests


def _default_url(args: argparse.Namespace) -> str:
    """Return the http URL that --host and --port give; the one that is missing is 127.0.0.1 or 8000. If neither is
    given, return the URL of the running stack called --name. Raises FailedPrecondition if no such stack runs."""
    from quire.local.state import StateDirectory

    if args.host or args.port:
        return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    state = StateDirectory(args.name).running()
    if state is None:
        raise FailedPrecondition(
            "NOT_RUNNING", f"No stack named {args.name!r} runs here.", "Start one with `quire up`, or give --base-url."
        )
    return state.http
