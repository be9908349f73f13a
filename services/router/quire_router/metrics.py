"""The router's metrics. Metrics of the per-token path are counted here in plain integers, and passed on when they are
scraped."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

from quire_common.errors import Overloaded, QuireError
from quire_common.telemetry import metrics
from quire_router.sequences.delta import FINISH_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Counter

ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

_requests = metrics.counter("quire_router_requests_total", "Requests that ended.", ("route", "code"))
in_flight = metrics.gauge("quire_router_sequences_in_flight", "Sequences that were admitted and have not ended.")
detokenize_backlog = metrics.gauge(
    "quire_router_detokenize_backlog_steps", "Engine steps that wait for a tokenizer's stream."
)
_MODEL = ("model_name",)
_ttft = metrics.histogram("quire_router_time_to_first_token_seconds", "Arrival to the first token.", _MODEL)
_e2e = metrics.histogram("quire_router_e2e_request_latency_seconds", "Arrival to the end of a request.", _MODEL)
_tpot = metrics.histogram(
    "quire_router_time_per_output_token_seconds",
    "Of a sequence: mean time between its tokens, from the first to the last.",
    _MODEL,
    ITL_BUCKETS_S,
)
_prompt_tokens = metrics.counter("quire_router_prompt_tokens_total", "Prompt tokens of admitted requests.", _MODEL)
_cached_tokens = metrics.counter("quire_router_prompt_tokens_cached_total", "Prompt tokens that a cache had.", _MODEL)
_generation_tokens = metrics.counter(
    "quire_router_generation_tokens_total", "Tokens that clients were given, counted when their request ends.", _MODEL
)
_finished = metrics.counter(
    "quire_router_sequences_finished_total", "Sequences by their end.", ("model_name", "finished_reason")
)
_request_prompt_tokens = metrics.histogram(
    "quire_router_request_prompt_tokens", "Prompt tokens per request.", _MODEL, TOKEN_BUCKETS
)
_request_generation_tokens = metrics.histogram(
    "quire_router_request_generation_tokens", "Generated tokens per request.", _MODEL, TOKEN_BUCKETS
)
_request_n = metrics.histogram(
    "quire_router_request_params_n",
    "Answers asked for to each prompt.",
    _MODEL,
    (1, 2, 5, 10, 20, 50, 128),
)
_request_max_tokens = metrics.histogram(
    "quire_router_request_params_max_tokens",
    "Most tokens that a sequence may have, as its request or the context allows.",
    _MODEL,
    TOKEN_BUCKETS,
)
migrations = metrics.counter(
    "quire_router_migrations_total",
    "Sequences that went on at another engine, by what happened to theirs.",
    ("reason",),
)
migration_wait = metrics.histogram(
    "quire_router_migration_wait_seconds", "How long a sequence that lost its engine had none."
)
detection = metrics.histogram(
    "quire_router_loss_detection_seconds",
    "From a session's last word to the end of the session, where it had sequences.",
)
http_refused = metrics.counter(
    "quire_router_http_refused_total", "HTTP requests that were answered by an error, by its code.", ("cause",)
)
http_body_bytes = metrics.gauge(
    "quire_router_http_body_bytes",
    "Memory that HTTP bodies count for: two bytes for each byte beyond 64 KiB; --max-bodies-mib bounds it.",
)
http_bodies_waiting = metrics.gauge(
    "quire_router_http_bodies_waiting", "Long HTTP bodies that wait for the process that parses them, or are parsed."
)
http_body_process_ended = metrics.counter(
    "quire_router_http_body_process_ended_total",
    "Processes that ended while they parsed a long HTTP body, by the cause.",
    ("cause",),
)
rate_limited = metrics.counter("quire_router_rate_limited_total", "Requests refused by a key's limit.", ("kind",))
_shed = metrics.counter(
    "quire_router_shed_total",
    "Requests that were refused to keep the load bounded, by the error's code and the key's name.",
    ("reason", "tenant"),
)
limits_shared = metrics.gauge("quire_router_rate_limits_shared", "1: Redis has the limits of keys; 0: they are local.")
attempts = metrics.histogram(
    "quire_router_sequence_attempts", "Engines that a sequence was given.", buckets=(1, 2, 3, 4, 6, 8, 16)
)
_FINE_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)
placement = metrics.histogram(
    "quire_router_placement_seconds", "Decision which engine runs a request.", buckets=_FINE_S
)
placement_expected = metrics.gauge(
    "quire_router_placement_expected_cached_tokens", "Prompt tokens so far that caches should have had where they went."
)
pd_decisions = metrics.counter(
    "quire_router_pd_decisions_total",
    "Where there are prefill replicas: whether a prompt went to one, or why not.",
    ("outcome",),
)
handoffs = metrics.counter(
    "quire_router_pd_handoffs_total",
    "Requests prefilled elsewhere, by how they came to their decode side: reserved (as planned), late (another was "
    "looked for), prefill_lost, decode_lost, ended_first.",
    ("outcome",),
)
second_token = metrics.histogram(
    "quire_router_pd_second_token_seconds", "From the end of a prefill elsewhere to the second token."
)
pulls = metrics.histogram("quire_router_pd_pull_seconds", "How long a decode side pulled pages of one request.")
pulled_pages = metrics.counter("quire_router_pd_pulled_pages_total", "Pages that decode sides pulled.")
pull_failures = metrics.counter(
    "quire_router_pd_pull_failures_total", "Pulls that did not bring all pages; the rest is computed.", ("code",)
)
client_transfers = metrics.counter(
    "quire_router_pd_client_transfers_total",
    "Requests whose kv_transfer_params say where they were prefilled: used, or why they are computed anew.",
    ("outcome",),
)
open_transfers = metrics.gauge("quire_router_pd_open_transfers", "Transfers that wait to be pulled or released.")
page_index_pages = metrics.gauge(
    "quire_router_page_index_pages", "Pages in the index: told of by their holders, or expected.", ("source",)
)
page_index_bytes = metrics.gauge("quire_router_page_index_bytes", "Memory of the page index.")
page_index_holders = metrics.gauge("quire_router_page_index_holders", "Schedulers and kvstores in the page index.")
page_index_dropped = metrics.counter(
    "quire_router_page_index_dropped_pages_total", "Pages for which the index had no room."
)
page_streams = metrics.gauge("quire_router_page_streams", "Page event streams that are followed.", ("service",))
page_resyncs = metrics.counter(
    "quire_router_page_resyncs_total",
    "Snapshots: of new holders, after a lost stream, because the router was behind, or after a gap.",
    ("reason",),
)
page_lag = metrics.histogram(
    "quire_router_page_event_age_seconds", "Age of the oldest change in a frame of page events, when it was sent."
)

responses_kept_bytes = metrics.gauge("quire_router_responses_kept_bytes", "Responses kept in this process.")
responses_dropped = metrics.counter(
    "quire_router_responses_dropped_total", "Responses that are not kept, or no more before their time.", ("reason",)
)
console_watchers = metrics.gauge("quire_router_console_watchers", "Consoles that are open.")
console_dropped = metrics.counter(
    "quire_router_console_dropped_total", "Consoles that were dropped since they read too slowly."
)


_tenant_requests = metrics.counter("quire_router_tenant_requests_total", "Requests that ended, by key.", ("tenant",))
_tenant_tokens = metrics.counter("quire_router_tenant_tokens_total", "Tokens of these requests.", ("tenant", "kind"))


@cache
def requests_counter(route: str, status: int) -> Counter:
    """Return the counter of ended requests with this route and status. It is made at the first call."""
    return _requests.labels(route, str(status))


class TenantMetrics:
    """The metrics of one tenant's requests. The constructor makes all of them, with the value 0."""

    def __init__(self, tenant_name: str) -> None:
        self._requests = _tenant_requests.labels(tenant_name)
        self._prompt_tokens = _tenant_tokens.labels(tenant_name, "prompt")
        self._generation_tokens = _tenant_tokens.labels(tenant_name, "generation")

    def request_ended(self, prompt_tokens: int, generation_tokens: int) -> None:
        """Count a request that has ended."""
        self._requests.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)


@cache
def of_tenant(tenant_name: str) -> TenantMetrics:
    """Return the metrics of the tenant with this name. The first call makes them, with the value 0."""
    return TenantMetrics(tenant_name)


def shed(error: QuireError, tenant_name: str) -> None:
    """Count a request of the tenant that was refused or ended because of the load (Overloaded, or the code DRAINING).
    Other errors are not counted."""
    if isinstance(error, Overloaded) or error.code == "DRAINING":
        _shed.labels(error.code, tenant_name).inc()


class PlainHistogram:
    """A histogram that only the event loop writes. Without locks, a value costs a bisection and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the histogram to a family for Prometheus, with cumulative buckets."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class PlainHistograms:
    """One histogram for each model. A collector of Prometheus' registry."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = bounds
        self._by_model: dict[str, PlainHistogram] = {}

    def labels(self, model: str) -> PlainHistogram:
        """Return the histogram of this model."""
        if model not in self._by_model:
            self._by_model = {**self._by_model, model: PlainHistogram(self._bounds)}
        return self._by_model[model]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric family. Called at each scrape, in the event loop, which serves the router's metrics."""
        family = HistogramMetricFamily(self._name, self._help, labels=_MODEL)
        for model, histogram in self._by_model.items():
            histogram.add_to(family, (model,))
        yield family


_itl = PlainHistograms("quire_router_inter_token_latency_seconds", "Between two tokens of a sequence.", ITL_BUCKETS_S)
metrics.registry.register(_itl)


class ModelMetrics:
    """The metrics of the requests to one model. The constructor makes all of them, with the value 0."""

    def __init__(self, model: str) -> None:
        """`model` is the engines' name of the model, whatever name clients ask for."""
        self.itl = _itl.labels(model)
        self.ttft = _ttft.labels(model)
        self.e2e = _e2e.labels(model)
        self.tpot = _tpot.labels(model)
        self.prompt_tokens = _prompt_tokens.labels(model)
        self.cached_tokens = _cached_tokens.labels(model)
        self.generation_tokens = _generation_tokens.labels(model)
        self.request_prompt_tokens = _request_prompt_tokens.labels(model)
        self.request_generation_tokens = _request_generation_tokens.labels(model)
        self.request_n = _request_n.labels(model)
        self.request_max_tokens = _request_max_tokens.labels(model)
        self._finished = {reason: _finished.labels(model, reason) for reason in FINISH_NAMES.values()}

    def sequence_finished(self, reason: str) -> None:
        """Count a sequence that ended for this reason, one of FINISH_NAMES."""
        self._finished[reason].inc()


@cache
def of_model(model: str) -> ModelMetrics:
    """Return the metrics of this model, given the engines' name of it. The first call makes them, with the value 0."""
    return ModelMetrics(model)
