"""The scheduler's metrics. For each step only a few histograms are updated. Most other metrics are updated at regular
intervals, or when a request ends."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import counter, gauge, histogram, registry

if TYPE_CHECKING:
    from prometheus_client import Counter

    from quire_common.credit import Report, WorkerHello
    from quire_scheduler.core.request import Request
    from quire_scheduler.core.scheduler import LoadFigures
    from quire_scheduler.core.stats import Stats

_P = "quire_scheduler_"
_STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

refused = counter(_P + "requests_refused_total", "Requests that were not admitted.", ("code",))
_running = gauge(_P + "requests_running", "Requests that hold a slot.")
_waiting = gauge(_P + "requests_waiting", "Requests that wait for a slot.")
_waiting_by_reason = gauge(
    _P + "requests_waiting_by_reason",
    "Requests that wait: for a slot or pages (capacity), or for the kvstore or another engine (deferred).",
    ("reason",),
)
_waiting_deferred = _waiting_by_reason.labels("deferred")
_waiting_capacity = _waiting_by_reason.labels("capacity")
_oldest_wait_s = gauge(_P + "oldest_wait_seconds", "How long the request has waited that waits longest; 0: none does.")
_kv_usage = gauge(_P + "kv_cache_usage_ratio", "Share of the device's pages in use, 0 to 1. Free pages may be cached.")
_cache_config = gauge(
    _P + "cache_config_info",
    "1; its labels are the sizes of the KV cache.",
    ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
)
_sleep_state = gauge(_P + "sleep_state", "1 for the present state. Engines never sleep.", ("sleep_state",))
_lora_info = gauge(
    _P + "lora_requests_info",
    "Unix time of the start; its labels say which LoRA adapters are in use: there are none.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
_pages = gauge(_P + "pages", "Device pages of the fullest KV group.", ("state",))
_free_pages = _pages.labels("free")
_cached_pages = _pages.labels("cached")
_referenced_pages = _pages.labels("referenced")
_fenced_pages = _pages.labels("fenced")
_finished = counter(_P + "requests_finished_total", "Requests that ended.", ("reason",))
_by_source = counter(_P + "prompt_tokens_by_source_total", "Prompt tokens by where their KV came from.", ("source",))
page_watchers = gauge(_P + "page_watchers", "WatchPages streams.")
page_snapshots = counter(
    _P + "page_snapshots_total",
    "Snapshots for new watchers and for those that fell behind the tail.",
    ("reason",),
)
_preemptions = counter(
    _P + "preemptions_total", "Times that a request lost its slot for lack of pages, by how they come back.", ("mode",)
)
_offloaded = counter(
    _P + "offload_pages_total",
    "Pages for the kvstore: stored, or not for want of room among stores, of the kvstore, or of time before they left.",
    ("result",),
)
_loaded = counter(_P + "kvstore_loaded_tokens_total", "Tokens loaded, by the slowest medium they were on.", ("medium",))
_transfers = counter(_P + "transfers_total", "Transfers of prefilled pages to others, by how they ended.", ("end",))
_open_transfers = gauge(_P + "open_transfers", "Transfers whose pages are held for others.")
_pull_s = histogram(_P + "pull_seconds", "How long pages of a request were on their way from another engine.")
kv_event_batches = counter(_P + "kv_event_batches_total", "Batches published on vLLM's event wire.")
kv_event_resyncs = counter(
    _P + "kv_event_resyncs_total", "Times that all was published anew, since changes came faster than they could leave."
)
_counts = {
    "steps": counter(_P + "steps_total", "Steps that the worker reported."),
    "grants": counter(_P + "grants_total", "Grants sent."),
    "prompt_tokens": counter(_P + "prompt_tokens_total", "Prompt tokens of started requests."),
    "cached_tokens": counter(_P + "prompt_tokens_cached_total", "Prompt tokens loaded instead of computed."),
    "generation_tokens": counter(_P + "generation_tokens_total", "Output tokens."),
    "prefill_tokens": counter(_P + "prefill_tokens_total", "Tokens computed by prefill, recomputation included."),
    "recomputes": _preemptions.labels("recompute"),
    "swaps": _preemptions.labels("swap"),
    "reclaims": counter(_P + "spares_reclaimed_total", "Times that a request started ahead was taken back for pages."),
    "pages_lost": counter(_P + "pages_lost_total", "Times that the worker lost a request's pages."),
    "late_tokens": counter(_P + "late_tokens_total", "Tokens of steps launched before their request was stopped."),
    "prefix_queries": counter(_P + "prefix_cache_queries_total", "Tokens looked for on the device at a start."),
    "prefix_hits": counter(_P + "prefix_cache_hits_total", "Tokens found on the device at a start."),
    "prompt_computed": _by_source.labels("computed"),
    "prompt_local": _by_source.labels("local_hit"),
    "prompt_kvstore": _by_source.labels("kvstore_hit"),
    "prompt_transferred": _by_source.labels("transferred"),
    "pulled_bytes": counter(_P + "pulled_bytes_total", "Bytes of pages that came from other engines."),
    "cache_queries": counter(_P + "external_prefix_cache_queries_total", "Prompt tokens looked up in the kvstore."),
    "cache_hits": counter(_P + "external_prefix_cache_hits_total", "Prompt tokens found in the kvstore."),
    "lookups_failed": counter(_P + "kvstore_lookups_failed_total", "Lookups that the kvstore did not answer in time."),
    "lookups_spared": counter(
        _P + "kvstore_lookups_spared_total",
        "Lookups not made: the router knew of nobody with more than the device has.",
    ),
    "offload_pages": _offloaded.labels("stored"),
    "offload_dropped": _offloaded.labels("dropped"),
    "offload_failed": _offloaded.labels("failed"),
    "offload_missed": _offloaded.labels("missed"),
}
# Engines do not draft: these stay 0, for dashboards that ask for them.
for _name, _text in (
    ("drafts", "Drafts."),
    ("draft_tokens", "Tokens of drafts."),
    ("accepted_tokens", "Tokens of drafts that were accepted."),
):
    counter(f"{_P}spec_decode_{_name}_total", _text)
# Counts by a label.
_labelled = {"loaded_tokens": _loaded, "transfers": _transfers}
_step_s = histogram(_P + "step_seconds", "Time of a step on the worker.", buckets=_STEP_BUCKETS_S)
_wait_s = histogram(_P + "worker_wait_seconds", "Time that the worker waited before a step.", buckets=_STEP_BUCKETS_S)
_queue_s = histogram(_P + "request_queue_seconds", "From submission to the first slot.")
_inference_s = histogram(_P + "request_inference_seconds", "From the first slot to the end.")
_prefill_s = histogram(_P + "request_prefill_seconds", "From the first slot to the first token.")
_decode_s = histogram(_P + "request_decode_seconds", "From the first token to the end.")
_step_tokens = histogram(
    _P + "step_tokens",
    "Tokens of a step: computed by prefill, and generated.",
    buckets=_TOKEN_BUCKETS,
)
_ttft_s = histogram(_P + "time_to_first_token_seconds", "From submission to the first token.")
_request_s = histogram(_P + "request_seconds", "From submission to the end.")


class Meter:
    """Turns the counts of one core into increments of the metrics."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(_counts, 0)
        self._labelled: dict[tuple[str, str], int] = {}

    def count(self, stats: Stats) -> None:
        """Add to the metrics the growth of the core's counts since the last call, also of loaded tokens and transfers
        by label. Ended requests are not counted here, but by `ended`."""
        for name, metric in _counts.items():
            value = getattr(stats, name)
            if value != self._seen[name]:
                metric.inc(value - self._seen[name])
                self._seen[name] = value
        for name, metric in _labelled.items():
            for label, value in getattr(stats, name).items():
                metric.labels(label or "unknown").inc(value - self._labelled.get((name, label), 0))
                self._labelled[name, label] = value


def steps(report: Report) -> None:
    """Record the time of each step of a Report, the wait before it, and its tokens."""
    for timing in report.timing:
        _wait_s.observe(timing.wait / 1e6)
        _step_s.observe((timing.prepare + timing.forward + timing.sample + timing.copy) / 1e6)
    for prefill, rows in zip(report.step_prefill_tokens.tolist(), report.step_rows.tolist(), strict=True):
        _step_tokens.observe(prefill + rows)


def name_model(model: str) -> None:
    """Label all metrics of the scheduler with the model that it serves."""
    registry.name_model(_P, model)


def describe(hello: WorkerHello, *, prefix_caching: bool) -> None:
    """Set the gauges that describe the engine: the KV cache's page size, its number of pages (of the KV group with the
    fewest, page 0 included) and whether prefixes are cached, the sleep state (always awake), and the LoRA adapters in
    use (always none)."""
    geometry = hello.model.pages
    _cache_config.clear()
    # Page 0 is never granted, as vLLM's null block; vLLM counts it.
    _cache_config.labels(str(geometry.page_size), str(min(hello.num_pages)), str(prefix_caching)).set(1)
    for state in ("awake", "weights_offloaded", "discard_all"):
        _sleep_state.labels(state).set(state == "awake")
    _lora_info.labels("0", "", "").set_to_current_time()


def show(load: LoadFigures, cached_pages: int, deferred: int) -> None:
    """Set the gauges of running and waiting requests, pages by state, page usage and open transfers. `cached_pages`:
    free pages that still hold a named prefix; they count as unused in the page usage. `deferred`: waiting requests
    that wait for the kvstore, for another engine or, set aside, for room to pull."""
    _running.set(load.running)
    _waiting.set(load.waiting)
    _waiting_deferred.set(deferred)
    _waiting_capacity.set(load.waiting - deferred)
    _kv_usage.set((load.pages - load.free_pages) / load.pages if load.pages else 0.0)
    _open_transfers.set(load.open_transfers)
    _free_pages.set(load.free_pages - cached_pages)
    _cached_pages.set(cached_pages)
    _referenced_pages.set(load.referenced_pages)
    _fenced_pages.set(load.pages - load.free_pages - load.referenced_pages)


def show_oldest_wait(seconds: float) -> None:
    """Set the gauge of the longest wait."""
    _oldest_wait_s.set(seconds)


@cache
def _finished_counter(reason: str) -> Counter:
    """Return the counter of requests that ended for this reason. It is made at the first call."""
    return _finished.labels(reason)


def ended(request: Request, reason: str) -> None:
    """Count a request that has ended, by the reason, and record in histograms how long each part of its life took.
    Parts that it did not reach are left out."""
    timing = request.timing
    _finished_counter(reason).inc()
    _request_s.observe(timing.finished_s - timing.submitted_s)
    if timing.pull_s:
        _pull_s.observe(timing.pull_s)
    if timing.first_start_s:
        _queue_s.observe(timing.first_start_s - timing.submitted_s)
        _inference_s.observe(timing.finished_s - timing.first_start_s)
    if timing.first_token_s:
        _ttft_s.observe(timing.first_token_s - timing.submitted_s)
        _prefill_s.observe(timing.first_token_s - timing.first_start_s)
        _decode_s.observe(timing.finished_s - timing.first_token_s)
