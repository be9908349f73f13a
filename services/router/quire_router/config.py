"""The router's configuration: flags, `QUIRE_ROUTER_*` and YAML become one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import ServiceConfig, option, split_address
from quire_common.errors import ConfigError
from quire_common.identity.exposure import require_private
from quire_common.identity.tls_files import TlsFiles
from quire_common.telemetry.vllm_names import COMPATIBLE_NAMES
from quire_router.placement.registry import PLACEMENTS
from quire_router.principal import MOST_PER_MINUTE


@dataclass(frozen=True)
class RouterConfig(ServiceConfig):
    """The public edge of Quire: HTTP and gRPC in, schedulers and tokenizers behind."""

    host: str = option("127.0.0.1", "address of the HTTP server")
    port: int = option(8000, "port of the HTTP server; 0 picks a free one", at_least=0, at_most=65535)
    http_workers: int = option(
        1,
        "processes that serve HTTP on the one port; each has metrics at --metrics-listen plus its number",
        at_least=1,
        at_most=64,
    )
    http_worker: int = option(0, "which of them this is; the first sets it for the others", at_least=0, at_most=63)
    ssl_certfile: str = option("", "PEM certificate of the public ports, HTTP and gRPC; default for gRPC: --tls-cert")
    ssl_keyfile: str = option("", "PEM key of the public ports")
    metrics_listen: str = option("", "host:port of metrics and administration over HTTP; empty: none")
    metrics_compat: str = option(
        "none", "metrics that are repeated under another system's names too", choices=COMPATIBLE_NAMES
    )
    api_key: tuple[str, ...] = option((), "API keys, comma separated; none: no authentication", secret=True)
    api_key_file: str = option(
        "", "YAML file of keys with digests, scopes and limits, or one API key per line; read again when it changes"
    )
    requests_per_minute: int = option(0, "limit of a key that has none of its own; 0: none", at_least=0)
    tokens_per_minute: int = option(
        0, "the same of prompt and generated tokens together", at_least=0, at_most=MOST_PER_MINUTE
    )
    redis: str = option(
        "",
        "redis://host:port/db in which routers share rate limits and responses; empty: each has its own",
        secret=True,
    )
    redis_file: str = option(
        "", "file with the value of --redis; its user and password may change while the router runs", file_of="redis"
    )
    served_model_name: tuple[str, ...] = option((), "names that clients may ask for; default: the model's own")
    schedulers: tuple[str, ...] = option((), "addresses of schedulers, for static discovery")
    tokenizers: tuple[str, ...] = option((), "addresses of tokenizers, for static discovery")
    vllm_grpc: bool = option(
        False, "serve vllm.grpc.engine.VllmEngine too, for SMG and llm-d; needs exactly one scheduler in --schedulers"
    )
    kvstores: tuple[str, ...] = option((), "addresses of kvstores, for static discovery; placement knows their pages")
    placement: str = option("kv_aware", "how a replica is chosen", choices=tuple(PLACEMENTS))
    placement_cache_weight: float = option(
        4.0, "kv_aware: what a prompt token to be computed counts against one that waits in a queue", at_least=0
    )
    placement_load_cost: float = option(
        0.5, "kv_aware: loading a token from a kvstore, against computing it", at_least=0, at_most=1
    )
    pd_threshold_tokens: int = option(
        2048,
        "while no rate is measured: prompts with so many uncached tokens are prefilled at a prefill replica",
        at_least=1,
    )
    pd_least_tokens: int = option(256, "prompts with fewer uncached tokens never are", at_least=1)
    pd_interference: float = option(
        0.3,
        "what a second of prefill costs each sequence that decodes beside it, in seconds of the request's own wait",
        at_least=0,
    )
    pd_between_both: bool = option(False, "let replicas of the role `both` prefill for others too")
    pd_by_rates: bool = option(
        True, "weigh both ways by what was measured; off: --pd-threshold-tokens alone decides, as in other engines"
    )
    kv_transfer_lease_s: float = option(
        60.0,
        "how long the pages of a kv_transfer_params prefill wait for their decode request",
        at_least=1,
        at_most=600,
    )
    page_index_pages: int = option(1_500_000, "pages that the index has room for; more are not known", at_least=1)
    page_grace_s: float = option(
        5.0, "how long the pages of a peer whose event stream broke are believed to be there", at_least=0
    )
    expected_pages_s: float = option(
        10.0, "how long, at least, pages of a request just placed are expected to appear", at_least=0.1
    )
    max_concurrent_requests: int = option(1024, "sequences in flight; more are refused with 429", at_least=1)
    max_body_bytes: int = option(
        4 * 1024 * 1024, "longest HTTP body, and longest gRPC request", at_least=1024, at_most=64 * 1024 * 1024
    )
    max_bodies_mib: int = option(
        256,
        "memory for long HTTP bodies from their arrival until they are tokenized; more are refused with 503",
        at_least=1,
    )
    max_connections: int = option(4096, "connections to each public port; more are closed at once", at_least=1)
    max_n: int = option(128, "greatest n", at_least=1)
    max_logprobs: int = option(20, "most alternatives per token that a request may ask for", at_least=0)
    request_timeout_s: float = option(
        600.0, "longest life of a request; 0: without limit", at_least=0, at_most=30 * 86_400
    )
    stream_ping_s: float = option(
        15.0, "a stream over HTTP that says nothing for so long gets a comment; 0: never", at_least=0
    )
    connect_timeout_s: float = option(5.0, "how long a new request waits for a tokenizer to come back", at_least=0)
    replica_timeout_s: float = option(
        2.0, "longest silence of a scheduler that promises signs of life, before its requests move", at_least=0.05
    )
    tokenizer_timeout_s: float = option(
        2.0, "longest silence of a tokenizer that owes an answer, before its work moves to another", at_least=0.05
    )
    migration_wait_s: float = option(
        30.0, "how long a request waits for an engine, and a running one for a tokenizer, to take it on", at_least=0
    )
    migration_limit: int = option(
        3, "engines in a row that a request may lose without a token, before it fails", at_least=1
    )
    client_stall_s: float = option(
        120.0, "a client that takes nothing of its answer for so long is dropped; 0: never", at_least=0
    )
    responses_max_mib: int = option(
        64, "memory for kept responses (/v1/responses), in Redis for one of them; 0: none are kept", at_least=0
    )
    responses_ttl_s: float = option(86_400.0, "how long a response is kept", at_least=1, at_most=10 * 365 * 86_400)
    allowed_origins: tuple[str, ...] = option((), "origins whose web pages may read answers; '*': any (CORS)")
    allowed_methods: tuple[str, ...] = option(("GET", "POST", "DELETE"), "methods that such pages may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that such pages may send; '*': any")
    allow_credentials: bool = option(False, "let such pages send cookies and client certificates")
    metrics_on_main: bool = option(False, "serve /metrics on the HTTP port too; always so while no API key is set")
    share_prefix_across_keys: bool = option(False, "let requests of different API keys share cached prefix pages")


def public_tls(config: RouterConfig) -> TlsFiles:
    """Return the certificate and key of the public gRPC port: those of --ssl-certfile and --ssl-keyfile or, without
    them, those between services. No authority is given, so clients present no certificate there."""
    if config.ssl_certfile or config.ssl_keyfile:
        return TlsFiles(config.ssl_certfile, config.ssl_keyfile)
    return TlsFiles(config.tls_cert, config.tls_key)


def check_body_memory(config: RouterConfig) -> None:
    """Raise ConfigError if --max-bodies-mib has no room for four times the longest body. A body's bytes count twice,
    and one key gets half of the memory."""
    least = 4 * config.max_body_bytes
    if config.max_bodies_mib << 20 < least:
        raise ConfigError(
            "MAX_BODIES_MIB",
            f"--max-bodies-mib {config.max_bodies_mib} has no room for bodies of {config.max_body_bytes} bytes.",
            f"Set --max-bodies-mib to {-(-least >> 20)} or more, or lower --max-body-bytes.",
        )


def refuse_plain_ports(config: RouterConfig) -> None:
    """Raise ConfigError if the HTTP port or the metrics port would be open to other hosts without TLS. With
    --ssl-certfile or --insecure, every host is allowed. Also raises it for a metrics address that is not host:port."""
    secured, fix = bool(config.ssl_certfile), "Give --ssl-certfile and --ssl-keyfile"
    require_private(config, config.host, "host", secured=secured, fix=fix)
    if config.metrics_listen:
        host, _ = split_address(config.metrics_listen, "--metrics-listen")
        require_private(config, host, "metrics_listen", secured=secured, fix=fix)
