"""The engine options of vLLM that Quire does not have under the same name. Each is accepted, translated, or refused
with a reason.

`quire.engine_options` has the options that a service takes under the same name. docs/vllm-options.md is made from both
tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class VllmOption:
    """One option. `neutral` are the values that ask for Quire's normal behaviour. `translate` converts a value to
    Quire's options. Without it, any other value is refused with `reason`, and `nearest` is the advice."""

    name: str
    reason: str
    nearest: str = ""
    neutral: tuple[str, ...] = ()
    # Any value is accepted, because it has no effect without another option, which is refused, or because of `reason`.
    accepted: bool = False
    translate: Callable[[Any], Mapping[str, Any]] | None = None
    switch: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return how the option is treated, for the table in docs: translated, accepted (any value), neutral values
        (only those), or refused."""
        if self.translate is not None:
            return "translated"
        if self.accepted:
            return "accepted"
        return "neutral values" if self.neutral else "refused"


def translated(option: VllmOption, value: Any, spelled: str) -> Mapping[str, Any]:
    """Return Quire's options, by name, for the value of an option of vLLM. The result is empty if the option has no
    effect, or the value asks for Quire's normal behaviour. `spelled` is the user's spelling, for errors. Raises
    InvalidArgument for a switch that is neither a bool nor the text true or false, and Unsupported, with the reason,
    for a value that Quire cannot follow; also the errors of the option's own translation."""
    if option.switch and _plain(value) not in ("true", "false"):
        raise InvalidArgument("BAD_VALUE", f"{spelled} is {value!r}.", "Give True or False.", param=option.name)
    if option.accepted or _plain(value) in option.neutral:
        return {}
    if option.translate is not None:
        return option.translate(value)
    shown = "" if option.switch and value else f" {_plain(value)}"
    fix = option.nearest or "Leave it out."
    raise Unsupported(
        "UNSUPPORTED_OPTION", f"{spelled}{shown} is not supported: {option.reason}", fix, param=option.name
    )


def _plain(value: Any) -> str:
    """Return a value in one spelling, whether it came from Python, YAML or a command line. A float 2.0 becomes `2`.
    Dicts and lists become compact JSON, in their own case and order. Everything else becomes lower-case text without
    spaces at the ends. So the text `2.0`, or JSON given as text, keeps its form."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, separators=(",", ":"), default=str)
    text = str(value).strip().lower()
    return text[:-2] if isinstance(value, float) and text.endswith(".0") else text


def _swap_space(value: Any) -> Mapping[str, Any]:
    """Translate swap-space (GiB) to kv-offloading-size, the kvstore's memory; 0 becomes no option. Raises
    InvalidArgument for a value that is not a number of 0 or more."""
    try:
        size = float(value)
    except (TypeError, ValueError):
        size = -1.0
    if not 0 <= size < float("inf"):
        raise InvalidArgument(
            "BAD_VALUE", f"swap-space is {value!r}.", "Give a number of GiB, 0 or more.", param="swap-space"
        )
    return {"kv-offloading-size": value} if size else {}


_GGUF_ONLY = "quantized weights are read from GGUF files only."


def _quantization(value: Any) -> Mapping[str, Any]:
    """Translate quantization int8 to --quantize int8. Raises Unsupported for other values."""
    if _plain(value) == "int8":
        return {"quantize": "int8"}
    raise Unsupported(
        "UNSUPPORTED_OPTION",
        f"quantization {value} is not supported: {_GGUF_ONLY}",
        "Serve a GGUF file, or give int8, which quantizes weights of floats when they are loaded, on a CPU.",
        param="quantization",
    )


# Fields that only say which CUDA graphs are captured, or how torch compiles; they change no answer.
_COMPILATION_FIELDS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_num_of_warmups"}
# The values of both fields that vLLM knows, as `_plain` spells them, and the ones that turn CUDA graphs off.
_COMPILATION_MODES = ("none", "stock_torch_compile", "dynamo_trace_once", "vllm_compile", "0", "1", "2", "3")
_GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "0", "1", "2")
_NO_GRAPHS = ("none", "0")


def _compilation(value: Any) -> Mapping[str, Any]:
    """Translate compilation-config, a JSON object or a level, to --enforce-eager if its cudagraph_mode or its level is
    NONE or 0, else to nothing. In an object, the level is `mode` or `level`; null means the default. The sizes of
    graphs, their maximum and the number of warm-ups are ignored. Raises Unsupported for other fields. Raises
    InvalidArgument for a value that is neither an object nor an integer, and for a level or a cudagraph_mode that vLLM
    does not have."""
    fields = value
    if isinstance(value, str):
        try:
            fields = json.loads(value)
        except ValueError:
            fields = None
    if isinstance(fields, int) and not isinstance(fields, bool):
        fields = {"mode": fields}
    if not isinstance(fields, dict):
        raise InvalidArgument(
            "BAD_VALUE",
            f"compilation-config is {value!r}.",
            "Give a JSON object or a level from 0 to 3.",
            param="compilation-config",
        )
    fields = dict(fields)
    mode = fields.pop("mode", fields.pop("level", None))
    graphs = fields.pop("cudagraph_mode", None)
    if unknown := sorted(set(fields) - _COMPILATION_FIELDS):
        raise Unsupported(
            "UNSUPPORTED_OPTION",
            f"compilation-config has {unknown[0]}, which is not supported: Quire's kernels are not compiled by torch.",
            "Leave it out. Quire reads mode, cudagraph_mode and cudagraph_capture_sizes.",
            param="compilation-config",
        )
    given = [
        _known_mode(name, setting, modes)
        for name, setting, modes in (("mode", mode, _COMPILATION_MODES), ("cudagraph_mode", graphs, _GRAPH_MODES))
        if setting is not None
    ]
    return {"enforce-eager": True} if any(setting in _NO_GRAPHS for setting in given) else {}


def _known_mode(name: str, value: Any, modes: tuple[str, ...]) -> str:
    """Return the value of a field of compilation-config in one spelling. Raises InvalidArgument unless it is one of
    `modes`."""
    if _plain(value) not in modes:
        raise InvalidArgument(
            "BAD_VALUE",
            f"compilation-config has {name} {value!r}.",
            f"Give one of: {', '.join(modes).upper()}.",
            param="compilation-config",
        )
    return _plain(value)


_ONE_GPU = "one worker runs on one GPU."
_COPIES = "Quire has another option for the number of copies of the model."
_REPLICAS = "Leave it out. `--replicas N` runs N copies of the model."
_LORA = "LoRA adapters are not served."
_MERGE = "Serve a checkpoint into which the adapter is merged."
_MEDIA = "only text is served."
_WITHOUT = "This option needs {}, which is refused."


def _neutral(name: str, values: str, reason: str, nearest: str = "", *aliases: str) -> VllmOption:
    return VllmOption(name, reason, nearest, tuple(values.split()), aliases=aliases)


def _switch(name: str, only: str, reason: str, nearest: str = "") -> VllmOption:
    """Make a switch whose value `only` is Quire's normal behaviour."""
    return VllmOption(name, reason, nearest, (only,), switch=True)


def _accepted(name: str, reason: str, *, switch: bool = False) -> VllmOption:
    return VllmOption(name, reason, accepted=True, switch=switch)


def _refused(name: str, reason: str, nearest: str = "") -> VllmOption:
    return VllmOption(name, reason, nearest)


VLLM_OPTIONS = (
    _refused(
        "config", "`quire` reads no configuration file.", "Give flags, or QUIRE_ variables: `quire config` shows each."
    ),
    _neutral("tokenizer-mode", "auto hf", "the files of the tokenizer decide which code is used."),
    _switch("trust-remote-code", "false", "code of a model is never run.", "Serve an architecture that Quire has."),
    _switch(
        "skip-tokenizer-init",
        "false",
        "the tokenizer service always starts.",
        "Send `prompt_token_ids`, read `token_ids`.",
    ),
    _neutral("task", "auto generate", "only text generation is served."),
    _neutral("runner", "auto generate", "only text generation is served."),
    _neutral("convert", "auto none", "only text generation is served."),
    _neutral("config-format", "auto hf", "Hugging Face folders and GGUF files are read."),
    _neutral("code-revision", "main none", "code of a model is never run."),
    _refused("hf-token", "any user of the machine can read a command line.", "Set the variable HF_TOKEN."),
    _refused("hf-config-path", "config.json is read from the model's folder."),
    VllmOption(
        "quantization",
        "int8 quantizes weights when they are loaded. None and gguf ask for what the model's file has.",
        "`--quantize`",
        ("none", "gguf"),
        translate=_quantization,
        aliases=("q",),
    ),
    _switch("allow-deprecated-quantization", "false", _GGUF_ONLY),
    _neutral("tensor-parallel-size", "1", _ONE_GPU, _REPLICAS, "tp"),
    _neutral("pipeline-parallel-size", "1", _ONE_GPU, _REPLICAS, "pp"),
    _neutral("prefill-context-parallel-size", "1", _ONE_GPU, _REPLICAS, "pcp"),
    _neutral("decode-context-parallel-size", "1", _ONE_GPU, _REPLICAS, "dcp"),
    _neutral("data-parallel-size", "1", _COPIES, "Use `--replicas N`.", "dp"),
    _neutral("data-parallel-size-local", "1", _COPIES, "Use `--replicas N`.", "dpl"),
    _neutral("data-parallel-backend", "mp", "Ray is not used.", "Leave it out.", "dpb"),
    _switch("enable-expert-parallel", "false", "experts are not divided among GPUs."),
    _neutral("distributed-executor-backend", "mp uni none", "each worker is a process; Ray is not used."),
    _switch("disable-custom-all-reduce", "false", _ONE_GPU),
    _neutral("nnodes", "1", "services on other hosts are found by --discovery.", "See services/common/README.md.", "n"),
    VllmOption(
        "swap-space",
        "memory of the kvstore, which keeps the KV pages of preempted requests",
        "--kv-offloading-size",
        translate=_swap_space,
    ),
    _neutral(
        "kv-offloading-backend",
        "native none",
        "KV pages that leave the worker go to the kvstore.",
        "See docs/operations.md.",
    ),
    _neutral("cpu-offload-gb", "0", "weights stay on the device.", "Serve a smaller model, or use --device cpu."),
    _neutral("offload-backend", "auto none", "weights stay on the device."),
    _switch("enable-chunked-prefill", "true", "long prompts are always split.", "Raise --max-num-batched-tokens."),
    _neutral("max-long-partial-prefills", "1", "one limit holds for all prompts.", "Use --max-num-partial-prefills."),
    _switch("disable-chunked-mm-input", "false", _MEDIA),
    _accepted(
        "async-scheduling", "The worker always computes ahead of the scheduler, unless --lockstep is set.", switch=True
    ),
    _switch("disable-hybrid-kv-cache-manager", "false", "all layers of a model use one kind of KV page."),
    _neutral(
        "num-gpu-blocks-override", "none", "the memory for KV pages is set in bytes.", "Use --kv-cache-memory-bytes."
    ),
    _neutral("prefix-caching-hash-algo", "sha256 sha256_cbor", "pages are always hashed with SHA-256."),
    _switch("calculate-kv-scales", "false", "KV pages in fp8 need no scales."),
    VllmOption(
        "compilation-config",
        "mode NONE (0) and cudagraph_mode NONE turn CUDA graphs off; lists of sizes are ignored",
        "--enforce-eager",
        translate=_compilation,
        aliases=("O", "cc"),
    ),
    _accepted("optimization-level", "Quire has no levels of optimization."),
    _accepted("cuda-graph-sizes", "CUDA graphs are captured for batch sizes up to --max-num-seqs."),
    _accepted("cudagraph-capture-sizes", "CUDA graphs are captured for batch sizes up to --max-num-seqs."),
    _accepted("max-cudagraph-capture-size", "CUDA graphs are captured for batch sizes up to --max-num-seqs."),
    _accepted("max-seq-len-to-capture", "CUDA graphs work for every context length."),
    _accepted("max-parallel-loading-workers", "Weights are read by several threads."),
    _neutral("stream-interval", "1", "each token is sent at once."),
    _neutral("speculative-config", "none {}", "there is no speculative decoding yet."),
    _neutral(
        "kv-transfer-config", "none {}", "KV pages travel by Quire's own transports.", "Use --prefill N --decode M."
    ),
    _neutral("ec-transfer-config", "none {}", _MEDIA),
    _neutral("limit-mm-per-prompt", "{} none", _MEDIA),
    _neutral("mm-processor-kwargs", "{} none", _MEDIA),
    _accepted("mm-processor-cache-gb", _MEDIA.capitalize()),
    _neutral("allowed-local-media-path", "none", _MEDIA),
    _switch("enable-lora", "false", _LORA, _MERGE),
    _refused("lora-modules", _LORA, _MERGE),
    *(_accepted(name, _WITHOUT.format("--enable-lora")) for name in ("max-loras", "max-lora-rank", "max-cpu-loras")),
    _accepted("fully-sharded-loras", _WITHOUT.format("--enable-lora"), switch=True),
    _neutral("guided-decoding-backend", "auto guidance", "grammars are always those of llguidance."),
    _neutral("structured-outputs-config", "{} none", "each request sets these options."),
    _accepted(
        "enable-auto-tool-choice",
        "Quire always finds tool calls if the model has a parser for them.",
        switch=True,
    ),
    _refused(
        "tool-parser-plugin",
        "parsers are part of the tokenizer.",
        "Use a parser of --tool-call-parser, which docs/tools.md lists.",
    ),
    _accepted("chat-template-content-format", "The chat template decides whether contents are lists or texts."),
    _neutral("response-role", "assistant", "answers always have the role assistant."),
    _accepted("disable-log-requests", "Prompts are never logged.", switch=True),
    _switch("enable-log-requests", "false", "prompts are never logged.", "Use traces: --otlp-traces-endpoint."),
    _switch("enable-log-outputs", "false", "answers are never logged.", "Use traces: --otlp-traces-endpoint."),
    _neutral("max-log-len", "none", "prompts are never logged."),
    _accepted("disable-log-stats", "Statistics are in /metrics and `quire status`, not in the log.", switch=True),
    _neutral(
        "collect-detailed-traces",
        "none",
        "traces always contain all phases of a request.",
        "Use --otlp-traces-endpoint.",
    ),
    _accepted("uvicorn-log-level", "--log-level sets the level of every service."),
    _accepted("disable-uvicorn-access-log", "There is no access log.", switch=True),
    _switch("disable-fastapi-docs", "false", "the page /docs is always served."),
    _neutral("root-path", "none", "the router adds no prefix to its paths.", "Let your proxy remove the prefix."),
    _refused("middleware", "an option cannot load code.", "Put a proxy in front."),
    _neutral("ssl-ca-certs", "none", "certificates of clients are not checked.", "Use --api-key-file."),
    _neutral("ssl-cert-reqs", "0", "certificates of clients are not checked.", "Use --api-key-file."),
    _accepted("enable-ssl-refresh", "Services always read changed certificate files, without a restart.", switch=True),
    _neutral("uds", "none", "the router listens on TCP.", "Use --host and --port."),
    _switch(
        "headless",
        "false",
        "on other hosts, services are started one by one.",
        "See docs/architecture.md, 'Start the five services by hand'.",
    ),
    _switch("enable-sleep-mode", "false", "a worker keeps its memory until it ends.", "Use `quire down`."),
    _switch("return-tokens-as-token-ids", "false", "each request sets this.", "Send return_tokens_as_token_ids."),
    _accepted("enable-prompt-tokens-details", "`usage` always contains the number of cached tokens.", switch=True),
    _neutral("logits-processor-pattern", "none", "a request cannot contain code.", "Use --logits-processors."),
    _neutral("logprobs-mode", "raw_logprobs", "logprobs are computed from the model's own logits."),
    _neutral("scheduler-cls", "none", "an option cannot load code.", "See docs/extending.md."),
    _neutral("worker-cls", "auto", "an option cannot load code.", "See docs/extending.md."),
    _neutral("worker-extension-cls", "none", "an option cannot load code.", "See docs/extending.md."),
    _neutral("additional-config", "{} none", "this option configures vLLM's plug-ins.", "See docs/extending.md."),
    _neutral("model-loader-extra-config", "{} none", "weights are read by one loader."),
    _neutral("pooler-config", "none {}", "only text generation is served."),
    _accepted("ignore-patterns", "Quire reads only the files that it needs."),
    _switch("use-tqdm-on-load", "true", "`quire up` shows the progress."),
    _switch("enable-eplb", "false", "experts are not divided among GPUs."),
    _accepted(
        "disable-cascade-attn", "Quire has no cascade attention, so there is nothing to switch off.", switch=True
    ),
    _switch("disable-sliding-window", "false", "the sliding window is part of the model."),
)
BY_NAME = {name: option for option in VLLM_OPTIONS for name in (option.name, *option.aliases)}
