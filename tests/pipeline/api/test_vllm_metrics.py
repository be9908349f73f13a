"""With `--metrics-compat vllm`, every metric that vLLM's dashboards and autoscalers ask for is there, and true."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from tests.held_ports import held_ports
from tests.metrics_text import Samples, alias_differences, scrape, table_of, total

pytestmark = pytest.mark.deep
PROMPT = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
LIMIT_S = 120.0
TOKENS, REQUESTS, CHOICES = 12, 4, 2
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "lora_requests_info",
    "cache_config_info",
)
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "generation_tokens",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
)


@pytest.fixture(scope="module")
def scraped(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    """Samples of router and scheduler after some requests, by service."""
    at = f"127.0.0.1:{held_ports(1)[0]}"
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {"served-model-name": "demo"},
        "router": {"metrics-compat": "vllm"},
        "scheduler": {"metrics-compat": "vllm", "metrics-listen": at, "kvstore-timeout-ms": "20000"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("metrics-state")))
        stack = LocalStack(StackSpec("metrics", str(demo_model), drain_timeout_s=5.0, flags=flags))
    try:
        for _ in range(REQUESTS):
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "n": CHOICES, "ignore_eos": True}
            assert httpx.post(f"{stack.ready.http}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
        http = stack.ready.http.removeprefix("http://")
        return {"router": scrape(http), "scheduler": settled(at)}
    finally:
        stack.close()


def settled(at: str) -> Samples:
    """The scheduler's samples once they have all tokens: its counters follow its figures a moment later."""
    end = time.monotonic() + LIMIT_S
    while True:
        samples = scrape(at)
        if total(samples, "vllm:generation_tokens_total") >= REQUESTS * CHOICES * TOKENS or time.monotonic() > end:
            return samples
        time.sleep(0.1)


def test_every_name_is_exported_by_one_service(scraped: dict[str, Samples]) -> None:
    wanted = {f"vllm:{name}" for name in GAUGES}
    wanted |= {f"vllm:{name}_total" for name in COUNTERS}
    wanted |= {f"vllm:{name}_{suffix}" for name in HISTOGRAMS for suffix in ("bucket", "count", "sum")}
    found = {service: {name for name in one if name.startswith("vllm:")} for service, one in scraped.items()}
    assert found["router"] | found["scheduler"] == wanted
    assert not found["router"] & found["scheduler"], "a sum over all targets would count twice"


@pytest.mark.parametrize("service", ["router", "scheduler"])
def test_every_alias_equals_its_source(scraped: dict[str, Samples], service: str) -> None:
    assert alias_differences(scraped[service], table_of(service)) == []


@pytest.mark.parametrize("service", ["router", "scheduler"])
def test_every_alias_names_model_and_engine(scraped: dict[str, Samples], service: str) -> None:
    model = {"model_name": "demo", "engine": "0"}
    for name, series in scraped[service].items():
        if name.startswith("vllm:"):
            assert series and all(frozenset(model.items()) <= labels for labels in series), name


def test_the_numbers_are_those_of_the_requests(scraped: dict[str, Samples]) -> None:
    router, scheduler = scraped["router"], scraped["scheduler"]
    sequences = REQUESTS * CHOICES
    assert total(router, "vllm:request_success_total", finished_reason="length") == sequences
    assert total(router, "vllm:request_params_n_sum") == sequences
    assert total(router, "vllm:request_params_max_tokens_sum") == sequences * TOKENS
    assert total(router, "vllm:request_generation_tokens_sum") == sequences * TOKENS
    assert total(router, "vllm:inter_token_latency_seconds_count") > 0
    assert total(router, "vllm:request_time_per_output_token_seconds_count") == sequences
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert total(router, f"vllm:{name}_seconds_count") == REQUESTS
        assert total(router, f"vllm:{name}_seconds_sum") > 0
    assert total(scheduler, "vllm:generation_tokens_total") == sequences * TOKENS
    prompts = total(scheduler, "vllm:prompt_tokens_total")
    assert prompts == CHOICES * total(router, "vllm:request_prompt_tokens_sum") > 0
    assert total(scheduler, "vllm:prompt_tokens_by_source_total") == prompts
    assert 0 < total(scheduler, "vllm:prefix_cache_hits_total") < total(scheduler, "vllm:prefix_cache_queries_total")
    for phase in ("queue", "inference", "prefill", "decode"):
        assert total(scheduler, f"vllm:request_{phase}_time_seconds_count") == sequences
    parts = sum(total(scheduler, f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode"))
    assert parts == pytest.approx(total(scheduler, "vllm:request_inference_time_seconds_sum"))
    steps = total(scheduler, "vllm:iteration_tokens_total_sum")
    assert steps == total(scheduler, "quire_scheduler_prefill_tokens_total") + sequences * TOKENS
    assert total(scheduler, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert total(scheduler, "vllm:engine_sleep_state") == 1
    assert total(scheduler, "vllm:num_requests_running") == total(scheduler, "vllm:num_requests_waiting") == 0
