"""vLLM's names of metrics, for `--metrics-compat vllm`, with Quire's metrics of the same meaning.

Only one service exports each name: the router counts requests, the scheduler counts steps and pages. So a sum over all
targets of Prometheus counts nothing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.telemetry.metrics_registry import Alias

if TYPE_CHECKING:
    from quire_common.telemetry.metrics_registry import MetricsRegistry

NONE, VLLM = "none", "vllm"
COMPATIBLE_NAMES = (NONE, VLLM)
# vLLM numbers the engines of one process. A scheduler has one.
_ENGINE = {"engine": "0"}
# Quire's metric by vLLM's name, which lacks its prefix here. The names of counters lack their `_total`.
ROUTER = {
    "request_success": "quire_router_sequences_finished",
    "time_to_first_token_seconds": "quire_router_time_to_first_token_seconds",
    "inter_token_latency_seconds": "quire_router_inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "quire_router_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "quire_router_e2e_request_latency_seconds",
    "request_prompt_tokens": "quire_router_request_prompt_tokens",
    "request_generation_tokens": "quire_router_request_generation_tokens",
    "request_params_n": "quire_router_request_params_n",
    "request_params_max_tokens": "quire_router_request_params_max_tokens",
}
SCHEDULER = {
    "num_requests_running": "quire_scheduler_requests_running",
    "num_requests_waiting": "quire_scheduler_requests_waiting",
    "num_requests_waiting_by_reason": "quire_scheduler_requests_waiting_by_reason",
    "kv_cache_usage_perc": "quire_scheduler_kv_cache_usage_ratio",
    "engine_sleep_state": "quire_scheduler_sleep_state",
    "lora_requests_info": "quire_scheduler_lora_requests_info",
    "cache_config_info": "quire_scheduler_cache_config_info",
    "prefix_cache_queries": "quire_scheduler_prefix_cache_queries",
    "prefix_cache_hits": "quire_scheduler_prefix_cache_hits",
    "external_prefix_cache_queries": "quire_scheduler_external_prefix_cache_queries",
    "external_prefix_cache_hits": "quire_scheduler_external_prefix_cache_hits",
    "num_preemptions": "quire_scheduler_preemptions",
    "prompt_tokens": "quire_scheduler_prompt_tokens",
    "prompt_tokens_cached": "quire_scheduler_prompt_tokens_cached",
    "prompt_tokens_by_source": "quire_scheduler_prompt_tokens_by_source",
    "generation_tokens": "quire_scheduler_generation_tokens",
    "spec_decode_num_drafts": "quire_scheduler_spec_decode_drafts",
    "spec_decode_num_draft_tokens": "quire_scheduler_spec_decode_draft_tokens",
    "spec_decode_num_accepted_tokens": "quire_scheduler_spec_decode_accepted_tokens",
    "request_queue_time_seconds": "quire_scheduler_request_queue_seconds",
    "request_inference_time_seconds": "quire_scheduler_request_inference_seconds",
    "request_prefill_time_seconds": "quire_scheduler_request_prefill_seconds",
    "request_decode_time_seconds": "quire_scheduler_request_decode_seconds",
    "iteration_tokens_total": "quire_scheduler_step_tokens",
}
# Labels that vLLM lacks: samples that differ only in them are summed.
_WITHOUT = {"num_preemptions": ("mode",)}


def aliases(service: str) -> list[Alias]:
    """Return the aliases of the router or of the scheduler."""
    names = {"router": ROUTER, "scheduler": SCHEDULER}[service]
    return [Alias(source, f"vllm:{name}", _WITHOUT.get(name, ()), _ENGINE) for name, source in names.items()]


def add_compatible_names(registry: MetricsRegistry, chosen: str, service: str) -> None:
    """Repeat the service's metrics under the names that `--metrics-compat` asks for."""
    if chosen == VLLM:
        registry.add_aliases(aliases(service))
