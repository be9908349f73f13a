"""The options of an engine, with vLLM's names and some of Quire's own, and the services that take each option.

`quire serve`, `quire up` and `LLM(...)` use the same table. The service that takes an option checks its value.
`quire.vllm_options` has the options of vLLM that no service takes under the same name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire import vllm_options
from quire.errors import InvalidArgument
from quire.local.spec import SERVICES


@dataclass(frozen=True)
class EngineOption:
    """An option. `takers` are pairs of a service and the service's own option. A switch has no value: it is on or
    off."""

    name: str
    takers: tuple[tuple[str, str], ...]
    help: str
    metavar: str = "N"
    switch: bool = False
    # Units of the service's own option in one of the user's.
    times: int = 1


def _to(name: str, service: str, help_text: str, metavar: str = "N", own: str = "") -> EngineOption:
    """Make an option with a value for one service, which calls it `own`, or `name` if that is empty."""
    return EngineOption(name, ((service, own or name),), help_text, metavar)


def _switch(name: str, service: str, help_text: str, own: str = "") -> EngineOption:
    """Make an on/off option for one service, which calls it `own`, or `name` if that is empty."""
    return EngineOption(name, ((service, own or name),), help_text, switch=True)


def _kvstore(own: str, help_text: str, metavar: str = "N") -> EngineOption:
    """Make the option `kvstore-OWN`, which the kvstore calls `own`."""
    return EngineOption(f"kvstore-{own}", (("kvstore", own),), help_text, metavar)


ENGINE_OPTIONS = (
    _to("served-model-name", "router", "names that clients may use for the model, comma separated", "NAME"),
    _to("ssl-keyfile", "router", "PEM key of the public ports", "FILE"),
    _to("ssl-certfile", "router", "PEM certificate of the public ports, HTTP and gRPC", "FILE"),
    EngineOption(
        "insecure",
        (("router", "insecure"), ("scheduler", "insecure")),
        "let other hosts reach the stack's ports without TLS",
        switch=True,
    ),
    _switch("vllm-grpc", "router", "serve vllm.grpc.engine.VllmEngine too, for SMG; one replica"),
    _to("api-server-count", "router", "router processes that share the HTTP port", own="http-workers"),
    _to(
        "redis",
        "router",
        "Redis in which the router's processes share rate limits and responses (default: none)",
        "URL",
    ),
    _switch("share-prefix-across-keys", "router", "requests of different API keys share cached KV pages"),
    _to("api-key-file", "router", "YAML file of API keys with scopes and limits, or one key per line", "FILE"),
    _to(
        "requests-per-minute", "router", "limit of requests for an API key that has no limit of its own (default: none)"
    ),
    _to("tokens-per-minute", "router", "limit of prompt and generated tokens together for such a key (default: none)"),
    _to(
        "allowed-origins",
        "router",
        "origins whose web pages may read answers (CORS); * allows any (default: none)",
        "ORIGIN,...",
    ),
    _to("allowed-methods", "router", "HTTP methods that pages of these origins may use, comma separated", "NAME"),
    _to(
        "allowed-headers",
        "router",
        "headers that pages of these origins may send, comma separated; * allows any",
        "NAME",
    ),
    _switch("allow-credentials", "router", "let pages of these origins send cookies and client certificates"),
    _to("metrics-listen", "router", "second port, of metrics and administration (default: none)", "HOST:PORT"),
    _switch("metrics-on-main", "router", "serve /metrics on the HTTP port too, if there are API keys"),
    EngineOption(
        "metrics-compat",
        (("router", "metrics-compat"), ("scheduler", "metrics-compat")),
        "vllm: metrics are there under vLLM's names too (default: none)",
        "NAME",
    ),
    _to("max-body-bytes", "router", "longest HTTP body", "BYTES"),
    _to("max-bodies-mib", "router", "memory for long HTTP bodies until they are tokenized", "MIB"),
    _to("max-n", "router", "most answers of one request"),
    _to("request-timeout-s", "router", "longest life of a request; 0: without limit", "S"),
    _to("max-logprobs", "router", "largest number of logprobs per token that a request may ask for"),
    EngineOption(
        "revision",
        (("worker", "revision"), ("tokenizer", "revision")),
        "branch, tag or commit of a model of the Hugging Face hub (default: main)",
        "NAME",
    ),
    EngineOption(
        "download-dir",
        (("worker", "download-dir"), ("tokenizer", "download-dir")),
        "cache in which models of the hub are found and kept (default: that of HF_HOME)",
        "FOLDER",
    ),
    _to("tokenizer", "tokenizer", "folder, GGUF file or hub's name of the tokenizer, if it is not the model's", "PATH"),
    _to("tokenizer-revision", "tokenizer", "branch, tag or commit of a tokenizer of the hub (default: main)", "NAME"),
    _to("chat-template", "tokenizer", "file with a chat template to use instead of the model's", "FILE"),
    _switch(
        "trust-request-chat-template",
        "tokenizer",
        "let requests contain their own chat template",
        "allow-request-chat-template",
    ),
    _to("tool-call-parser", "tokenizer", "parser that finds tool calls (default: by the chat template); none", "NAME"),
    _to("reasoning-parser", "tokenizer", "parser that finds reasoning (default: by the chat template); none", "NAME"),
    _to("reasoning-config", "tokenizer", "JSON as in vLLM: the texts around the model's thinking", "JSON"),
    EngineOption(
        "max-model-len",
        (("worker", "max-model-len"), ("scheduler", "max-model-len")),
        "largest number of tokens of a prompt and its answer together",
    ),
    EngineOption(
        "max-num-batched-tokens",
        (("scheduler", "max-num-batched-tokens"), ("worker", "max-num-batched-tokens")),
        "largest number of tokens in one step (one forward pass)",
    ),
    _to("scheduling-policy", "scheduler", "order of waiting requests: fair, the default, fcfs or priority", "NAME"),
    _to("long-prefill-token-threshold", "scheduler", "largest number of tokens of one prompt in a step"),
    _to("max-num-partial-prefills", "scheduler", "largest number of prompts that are partly computed at the same time"),
    _to("max-num-seqs", "worker", "largest number of sequences in a step"),
    _to("block-size", "worker", "number of tokens in a KV page"),
    _to("kv-cache-memory-bytes", "worker", "memory for KV pages", "BYTES"),
    _to("device", "worker", "auto, cpu or cuda", "NAME"),
    _to("gpu-memory-utilization", "worker", "share of the GPU's memory that the worker uses", "SHARE"),
    _switch("enforce-eager", "worker", "launch kernels one by one, without CUDA graphs"),
    _switch("batch-invariant", "worker", "answers do not depend on the batch, on a GPU too"),
    _to(
        "dtype",
        "worker",
        "type of the weights: auto, bfloat16, float16 or float32; a GPU has only bfloat16",
        "NAME",
    ),
    _to("quantize", "worker", "int8: on a CPU, quantize weights of floats when they are loaded; or none", "NAME"),
    _to("load-format", "worker", "auto, safetensors, gguf or dummy", "NAME"),
    _to(
        "model-impl",
        "worker",
        "what computes the layers: auto, quire (Quire's own model families) or transformers (the Transformers backend)",
        "NAME",
    ),
    EngineOption(
        "hf-overrides",
        (("worker", "hf-overrides"), ("tokenizer", "hf-overrides")),
        "JSON: fields that replace those of config.json; an object replaces the whole field",
        "JSON",
    ),
    _to(
        "generation-config",
        "worker",
        "where defaults of sampling parameters are read: auto (the model's generation_config.json), vllm (nowhere), or "
        "a folder",
        "PLACE",
    ),
    _to(
        "override-generation-config",
        "worker",
        "JSON as in vLLM: defaults of sampling parameters, which win over those of the model",
        "JSON",
    ),
    _to("seed", "worker", "seed of the random weights of --load-format dummy"),
    _to("attention-backend", "worker", "auto; cpu or torch on a CPU; cudnn or triton on a GPU", "NAME"),
    _to("kv-cache-dtype", "worker", "data type of KV pages: auto, or fp8 on a GPU", "NAME"),
    _to("torch-threads", "worker", "threads of a CPU worker"),
    _to("logits-processors", "worker", "installed logits processors that requests may use, comma separated", "NAME"),
    _switch(
        "enable-prefix-caching",
        "scheduler",
        "keep KV pages for later requests with the same beginning (--no-enable-prefix-caching turns this off)",
    ),
    EngineOption(
        "lockstep",
        (("worker", "lockstep"), ("scheduler", "lockstep")),
        "one Grant, one step, one Report: the plain version of the free-running engine",
        switch=True,
    ),
    EngineOption(
        "kv-offloading-size",
        (("kvstore", "ram-bytes"),),
        "memory of the kvstore, for copies of the workers' KV pages (default: 1 GiB)",
        "GIB",
        times=1 << 30,
    ),
    _kvstore("disk-path", "folder for KV pages on disk (default: one in the user's cache, or of the stack)", "FOLDER"),
    _kvstore("disk-bytes", "room for KV pages on disk (default: 8 GiB); 0: none", "BYTES"),
    _kvstore("redis-url", "Redis for KV pages that several stacks share (default: none)", "URL"),
    _kvstore("redis-ttl-s", "life of a page in Redis since it was last put or read", "S"),
    _kvstore("ram-policy", "which pages leave memory first: lru or arc", "NAME"),
    _kvstore("disk-policy", "which pages leave the disk first: lru or arc", "NAME"),
    _kvstore("disk-write", "pages that go to the disk: write-through, selective (found twice) or off", "NAME"),
    _kvstore("redis-write", "pages that go to Redis: write-through, selective (found twice) or off", "NAME"),
    _to(
        "kvstore-offload",
        "scheduler",
        "when KV pages go to the kvstore: write-through, on-evict, selective or off",
        "NAME",
    ),
    _to(
        "kvstore-timeout-ms",
        "scheduler",
        "longest wait for the kvstore (default: half of the time that it may save)",
        "MS",
    ),
    _to("kv-events-config", "scheduler", "JSON as in vLLM: publish changes of the prefix cache over ZeroMQ", "JSON"),
    EngineOption(
        "worker-timeout-s",
        (("worker", "worker-timeout-s"), ("scheduler", "worker-timeout-s")),
        "longest time of a step before the worker is given up, and ends",
        "S",
    ),
    _to("paced", "worker", "no model: steps of this length and made-up tokens, for tests of time", "STEP_MS"),
    EngineOption(
        "otlp-traces-endpoint",
        tuple((service, "otlp-traces-endpoint") for service in SERVICES),
        "OTLP/gRPC endpoint for traces",
        "URL",
    ),
    EngineOption(
        "otlp-tls-ca",
        tuple((service, "otlp-tls-ca") for service in SERVICES),
        "PEM authority of an https endpoint for traces (default: those of the system)",
        "FILE",
    ),
    EngineOption(
        "otlp-sampling-ratio",
        tuple((service, "otlp-sampling-ratio") for service in SERVICES),
        "share of requests that are traced (default: 1.0)",
        "SHARE",
    ),
    EngineOption("log-level", tuple((service, "log-level") for service in SERVICES), "least level logged", "LEVEL"),
)
_BY_NAME = {option.name: option for option in ENGINE_OPTIONS}

# Every name that a user may give, without aliases.
OPTION_NAMES = (*_BY_NAME, *(option.name for option in vllm_options.VLLM_OPTIONS))


def stack_flags(options: Mapping[str, Any]) -> dict[str, dict[str, str | bool]]:
    """Translate a user's options, by Quire's or vLLM's names (dashes or underscores), into flags: service -> the
    service's own option -> value. Options that are None are left out. A value given by Quire's name wins over one that
    a vLLM option is translated into. Raises InvalidArgument or Unsupported for an option or value that Quire does not
    have."""
    given = {key.replace("_", "-"): (key, value) for key, value in options.items() if value is not None}
    wanted: dict[str, Any] = {}
    for name, (key, value) in given.items():
        if name in vllm_options.BY_NAME:
            wanted |= vllm_options.translated(vllm_options.BY_NAME[name], value, key)
        elif name not in _BY_NAME:
            raise unknown_option(name, key)
    # What was given by Quire's own name counts, whatever vLLM's names are translated into.
    wanted |= {name: value for name, (_, value) in given.items() if name in _BY_NAME}
    flags: dict[str, dict[str, str | bool]] = {}
    for name, value in wanted.items():
        for service, own in _BY_NAME[name].takers:
            flags.setdefault(service, {})[own] = _spell(_BY_NAME[name], value)
    return flags


def unknown_option(name: str, spelled: str, extra: Iterable[str] = ()) -> InvalidArgument:
    """Return the error for an option that neither Quire nor vLLM has. Its fix suggests the closest name of OPTION_NAMES
    and `extra`, or else `quire serve --help`. `spelled` is the user's spelling: with a leading dash, the suggestion is
    a flag."""
    close = difflib.get_close_matches(name, [*OPTION_NAMES, *extra], n=1)
    suggestion = f"--{close[0]}" if close and spelled.startswith("-") else "".join(close).replace("-", "_")
    fix = f"Did you mean {suggestion}?" if close else "See `quire serve --help`."
    return InvalidArgument("UNKNOWN_OPTION", f"Unknown option {spelled}.", fix, param=name)


def _spell(option: EngineOption, value: Any) -> str | bool:
    """Return the value for the service's flag: a bool for a switch, JSON for a dict, commas between the items of a
    list, else text. Numbers are converted to the unit of the service's option. Raises InvalidArgument for a switch
    whose value is no bool, and for a value to convert that is not a number."""
    if option.switch:
        if not isinstance(value, bool):
            raise InvalidArgument("BAD_VALUE", f"{option.name} is {value!r}.", "Give True or False.", param=option.name)
        return value
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value) if option.times == 1 else str(_multiply(option, value))


def _multiply(option: EngineOption, value: Any) -> int:
    """Return a number in the unit of the service's option (`times` as many), without its fraction. Raises
    InvalidArgument for a value that is not a number."""
    try:
        return int(float(value) * option.times)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"{option.name} is {value!r}."
        raise InvalidArgument("BAD_VALUE", message, "Give a number.", param=option.name) from error
