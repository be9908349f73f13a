"""Panels of the Grafana dashboards: a table for each, with its PromQL. `$model` is the chosen model."""

from __future__ import annotations

from dataclasses import dataclass

_M = 'model_name=~"$model"'
_R = "[$__rate_interval]"
_QUANTILES = ("0.5", "0.95", "0.99")


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `queries` are pairs of an expression and a legend. `everywhere` True: the panel has data in every stack;
    False: only in stacks with the part that its text names."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""
    everywhere: bool = True


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def _quantiles(metric: str, selector: str = _M, by: str = "") -> tuple[tuple[str, str], ...]:
    """Return queries for quantiles of a histogram. `by` is a further label, as in `medium, `."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label.strip())
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({by}le) (rate({metric}_bucket{{{selector}}}{_R})))",
            f"{legend} p{q[2:]:0<2}",
        )
        for q in _QUANTILES
    )


def _p95(metric: str, by: str, selector: str = "") -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return ((f"histogram_quantile(0.95, sum by ({by}, le) (rate({metric}_bucket{{{selector}}}{_R})))", legend),)


def _rate(metric: str, by: str = "", selector: str = "", *, rare: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the rate of a counter by labels. `rare`: a counter that may have no series yet counts as 0."""
    rate = f"rate({metric}{{{selector}}}{_R})"
    query = f"sum by ({by}) ({rate})" if by else f"sum({rate})"
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else metric
    return ((f"{query} or vector(0)" if rare else query, legend),)


def _share(part: str, whole: str, selector: str = _M) -> str:
    return f"sum(rate({part}{{{selector}}}{_R})) / sum(rate({whole}{{{selector}}}{_R}))"


_FLEET = Dashboard(
    "fleet",
    "Fleet",
    "Is the service well? Requests, waits, latencies, and what is wrong with processes.",
    (
        Panel("Requests by status", "reqps", _rate("quire_router_requests_total", "code")),
        Panel(
            "Server errors",
            "percentunit",
            (
                (
                    f'(sum(rate(quire_router_requests_total{{code=~"5.."}}{_R})) or vector(0))'
                    f" / sum(rate(quire_router_requests_total{_R}))",
                    "share of 5xx",
                ),
            ),
        ),
        Panel(
            "Requests inside",
            "short",
            (
                (f"sum(quire_scheduler_requests_running{{{_M}}})", "running"),
                (f"sum(quire_scheduler_requests_waiting{{{_M}}})", "waiting"),
                ("sum(quire_router_sequences_in_flight)", "at the routers"),
            ),
        ),
        Panel(
            "Oldest wait",
            "s",
            ((f"max by (instance) (quire_scheduler_oldest_wait_seconds{{{_M}}})", "{{instance}}"),),
            "What autoscaling should look at.",
        ),
        Panel("Time to first token", "s", _quantiles("quire_router_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("quire_router_inter_token_latency_seconds")),
        Panel("Request latency", "s", _quantiles("quire_router_e2e_request_latency_seconds")),
        Panel(
            "Tokens",
            "short",
            (
                (f"sum(rate(quire_scheduler_generation_tokens_total{{{_M}}}{_R}))", "generated per second"),
                (f"sum(rate(quire_scheduler_prompt_tokens_total{{{_M}}}{_R}))", "of prompts per second"),
            ),
        ),
        Panel(
            "Ends of sequences",
            "short",
            _rate("quire_router_sequences_finished_total", "finished_reason", _M),
        ),
        Panel("Targets that answer", "short", (('sum by (job) (up{job=~"quire-.*"})', "{{job}}"),)),
        Panel("Versions", "short", (("count by (service, version) (quire_build_info)", "{{service}} {{version}}"),)),
        Panel(
            "Moves to another engine",
            "short",
            _rate("quire_router_migrations_total", "reason", rare=True),
        ),
        Panel("Event loop lag, p95", "s", _p95("quire_event_loop_lag_seconds", "job")),
        Panel("Open circuit breakers", "short", (("max by (breaker) (quire_circuit_breaker_open)", "{{breaker}}"),)),
        Panel("Redis answers", "short", (("min by (use) (quire_redis_up)", "{{use}}"),), "Of services that use Redis."),
        Panel(
            "Certificates end in",
            "s",
            (("min by (file) (quire_certificate_expiry_timestamp_seconds - time())", "{{file}}"),),
            "Of services with TLS.",
        ),
        Panel("Memory", "bytes", (('process_resident_memory_bytes{job=~"quire-.*"}', "{{instance}}"),)),
        Panel("CPU", "short", ((f'rate(process_cpu_seconds_total{{job=~"quire-.*"}}{_R})', "{{instance}}"),)),
    ),
)
_ENGINE = Dashboard(
    "engine",
    "Engine",
    "What the engines do: steps, batches, how busy the devices are, where a request's time goes.",
    (
        Panel("Time of a step", "s", _quantiles("quire_worker_step_seconds")),
        Panel("Wait of the worker before a step", "s", _quantiles("quire_scheduler_worker_wait_seconds")),
        Panel(
            "Tokens per step, mean",
            "short",
            ((_share("quire_scheduler_step_tokens_sum", "quire_scheduler_step_tokens_count"), "tokens"),),
        ),
        Panel(
            "Device utilisation",
            "percentunit",
            ((f"sum by (instance) (rate(quire_worker_busy_seconds_total{{{_M}}}{_R}))", "{{instance}}"),),
            "Share of the time in which steps ran.",
        ),
        Panel(
            "Achieved FLOP/s",
            "flops",
            ((f"sum by (instance) (rate(quire_worker_flops_total{{{_M}}}{_R}))", "{{instance}}"),),
            "By the model's sizes, over all the time.",
        ),
        Panel(
            "Achieved bandwidth",
            "Bps",
            ((f"sum by (instance) (rate(quire_worker_memory_bytes_total{{{_M}}}{_R}))", "{{instance}}"),),
            "Weights, keys and values, by the model's sizes, over all the time.",
        ),
        Panel(
            "GPU utilisation and memory",
            "percentunit",
            (
                (f"quire_worker_gpu_utilization_ratio{{{_M}}}", "{{instance}} utilisation"),
                (
                    f"quire_worker_gpu_memory_used_bytes{{{_M}}} / quire_worker_gpu_memory_total_bytes{{{_M}}}",
                    "{{instance}} memory",
                ),
            ),
            "Of the whole GPU, where a worker has one with NVML.",
            everywhere=False,
        ),
        Panel("Slots", "short", ((f"sum by (state) (quire_worker_slots{{{_M}}})", "{{state}}"),)),
        Panel("Tokens computed", "short", _rate("quire_worker_tokens_total", "kind", _M)),
        Panel("Steps", "short", _rate("quire_worker_steps_total", "instance", _M)),
        Panel("Time in the queue", "s", _quantiles("quire_scheduler_request_queue_seconds")),
        Panel("Time of prefill", "s", _quantiles("quire_scheduler_request_prefill_seconds")),
        Panel("Time of decode", "s", _quantiles("quire_scheduler_request_decode_seconds")),
        Panel(
            "Waiting, by reason",
            "short",
            ((f"sum by (reason) (quire_scheduler_requests_waiting_by_reason{{{_M}}})", "{{reason}}"),),
        ),
        Panel("Preemptions", "short", _rate("quire_scheduler_preemptions_total", "mode", _M)),
        Panel("Refused by schedulers", "short", _rate("quire_scheduler_requests_refused_total", "code", _M, rare=True)),
    ),
)
_KV = Dashboard(
    "kv",
    "KV cache",
    "Where KV pages are, how often they are found, and how fast they move.",
    (
        Panel(
            "Device pages in use",
            "percentunit",
            ((f"quire_scheduler_kv_cache_usage_ratio{{{_M}}}", "{{instance}}"),),
        ),
        Panel(
            "Device pages",
            "short",
            ((f"sum by (state) (quire_scheduler_pages{{{_M}}})", "{{state}}"),),
        ),
        Panel(
            "Prompt tokens by source",
            "short",
            _rate("quire_scheduler_prompt_tokens_by_source_total", "source", _M),
        ),
        Panel(
            "Found on the device",
            "percentunit",
            (
                (
                    _share("quire_scheduler_prefix_cache_hits_total", "quire_scheduler_prefix_cache_queries_total"),
                    "share",
                ),
            ),
        ),
        Panel(
            "Found in the kvstore",
            "percentunit",
            (
                (
                    _share(
                        "quire_scheduler_external_prefix_cache_hits_total",
                        "quire_scheduler_external_prefix_cache_queries_total",
                    ),
                    "share of what was looked up",
                ),
            ),
        ),
        Panel("Pages for the kvstore", "short", _rate("quire_scheduler_offload_pages_total", "result", _M)),
        Panel("Pages of the kvstore", "short", (("sum by (medium) (quire_kvstore_pages)", "{{medium}}"),)),
        Panel(
            "Room taken",
            "bytes",
            (
                ("sum by (medium) (quire_kvstore_used_bytes)", "{{medium}}"),
                ("sum by (medium) (quire_kvstore_capacity_bytes)", "{{medium}} capacity"),
            ),
        ),
        Panel("Tiers that work", "short", (("min by (medium) (quire_kvstore_available)", "{{medium}}"),)),
        Panel("Pages found, by tier", "short", _rate("quire_kvstore_tier_hits_total", "medium")),
        Panel("Reads and writes, p95", "s", _p95("quire_kvstore_tier_operation_seconds", "medium, operation")),
        Panel("Evictions", "short", _rate("quire_kvstore_evictions_total", "medium")),
        Panel("Errors of tiers", "short", _rate("quire_kvstore_tier_errors_total", "medium")),
        Panel("Moves of workers, p95", "s", _p95("quire_worker_move_seconds", "kind", _M)),
        Panel("Pages moved", "short", _rate("quire_worker_pages_moved_total", "kind", _M)),
        Panel("Failed moves", "short", _rate("quire_worker_moves_failed_total", "kind", _M, rare=True)),
        Panel("Lookups without an answer", "short", _rate("quire_scheduler_kvstore_lookups_failed_total", "", _M)),
        Panel(
            "Pages in the router's index", "short", (("sum by (source) (quire_router_page_index_pages)", "{{source}}"),)
        ),
    ),
)
_PD = Dashboard(
    "pd",
    "Prefill and decode",
    "Prompts that one replica computes and another goes on with.",
    (
        Panel("Decisions", "short", _rate("quire_router_pd_decisions_total", "outcome")),
        Panel("Handoffs", "short", _rate("quire_router_pd_handoffs_total", "outcome")),
        Panel("From prefill to the second token", "s", _quantiles("quire_router_pd_second_token_seconds", "")),
        Panel("Time of a pull", "s", _quantiles("quire_router_pd_pull_seconds", "")),
        Panel("Pages pulled", "short", _rate("quire_router_pd_pulled_pages_total")),
        Panel("Bytes pulled", "Bps", _rate("quire_scheduler_pulled_bytes_total", "instance", _M)),
        Panel("Failed pulls", "short", _rate("quire_router_pd_pull_failures_total", "code", rare=True)),
        Panel(
            "Open transfers",
            "short",
            ((f"sum by (instance) (quire_scheduler_open_transfers{{{_M}}})", "{{instance}}"),),
        ),
        Panel("Ends of transfers", "short", _rate("quire_scheduler_transfers_total", "end", _M)),
        Panel("Running, by replica", "short", ((f"quire_scheduler_requests_running{{{_M}}}", "{{instance}}"),)),
        Panel("Waiting, by replica", "short", ((f"quire_scheduler_requests_waiting{{{_M}}}", "{{instance}}"),)),
        Panel("Prefilled tokens", "short", _rate("quire_scheduler_prefill_tokens_total", "instance", _M)),
    ),
)
_TENANTS = Dashboard(
    "tenants",
    "Tenants",
    "What each API key asks for and is refused. A key without a name appears as a digest.",
    (
        Panel("Requests", "reqps", _rate("quire_router_tenant_requests_total", "tenant")),
        Panel("Tokens", "short", _rate("quire_router_tenant_tokens_total", "tenant, kind")),
        Panel("Refused for the load's sake", "short", _rate("quire_router_shed_total", "tenant, reason", rare=True)),
        Panel("Refused by limits of keys", "short", _rate("quire_router_rate_limited_total", "kind", rare=True)),
        Panel("Limits are shared through Redis", "short", (("min(quire_router_rate_limits_shared)", "shared"),)),
        Panel("Refused over HTTP", "short", _rate("quire_router_http_refused_total", "cause", rare=True)),
    ),
)
DASHBOARDS = (_FLEET, _ENGINE, _KV, _PD, _TENANTS)
