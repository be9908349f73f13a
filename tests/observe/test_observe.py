"""A real Prometheus and a collector of traces see a real stack, with prefill and decode apart, TLS, Redis and tenants:
every dashboard has data, every alert is understood, every alias is true, a request is one trace over all services."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from quire.__main__ import main
from quire.local.ports import free_ports
from quire.local.spec import SERVICES, StackSpec, service_of
from quire.local.stack import LocalStack
from quire.models import find_model
from tests.metrics_text import alias_differences, parse, table_of
from tests.observe.prometheus import OBSERVABILITY, Prometheus, binary, has_data
from tests.otlp_sink import OtlpSink, SinkSpan
from tests.redis_server import RedisServer
from tests.unit.deployment.test_observability import ALERTS, expressions, metrics_of
from tools.dashboard_panels import DASHBOARDS

pytestmark = pytest.mark.slow
LIMIT_S = 300.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PROMPT = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n" * 3
# One key may send this many requests a minute; the router refuses the next ones.
FEW = 2
PANELS = [
    pytest.param(expression, panel.everywhere, id=f"{dashboard.name}: {panel.title}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for expression, _ in panel.queries
]
# Metrics of GPUs: there is no GPU here.
ONLY_WITH_GPU = "quire_worker_gpu_"
# Series that are there only once something has gone wrong, which nothing does here.
ONLY_AFTER_FAILURES = {"quire_router_migrations_total"}


@dataclass(frozen=True)
class Observed:
    """A stack under load, and who looks at it."""

    stack: LocalStack
    prometheus: Prometheus
    sink: OtlpSink
    addresses: dict[str, str]
    certificates: Path

    def scrape(self, member: str) -> str:
        service, folder = service_of(member), self.certificates
        public = service == "router"
        context = ssl.create_default_context(cafile=str(folder / ("public-ca.pem" if public else "ca.pem")))
        context.check_hostname = False  # certificates name services, not addresses
        if not public:
            context.load_cert_chain(folder / "metrics.pem", folder / "metrics.key")
        request = urllib.request.Request(f"https://{self.addresses[member]}/metrics", headers=bearer("alice"))
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=context) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observe")
    certificates = folder / "certs"
    assert main(["certs", str(certificates)]) == 0
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("QUIRE_STATE_DIR", str(folder / "state"))
        patch.setenv("QUIRE_WORKER_ATTENTION_BACKEND", "torch")
        redis, sink = RedisServer(), stack.enter_context(OtlpSink())
        stack.callback(redis.close)
        redis.start()
        spec = make_spec(folder, certificates, redis.url, sink.endpoint)
        running = LocalStack(spec)
        stack.callback(running.close)
        addresses = {name: str(spec.flags[name]["metrics-listen"]) for name in spec.members}
        targets = {service: [addresses[name] for name in spec.members_of(service)] for service in SERVICES}
        (port,) = free_ports(1)
        (folder / "prometheus").mkdir()
        prometheus = Prometheus(folder / "prometheus", port, targets, str(certificates), "alice")
        stack.callback(prometheus.close)
        seen = Observed(running, prometheus, sink, addresses, certificates)
        with load(seen):
            prometheus.wait_for_targets(len(spec.members))
            yield seen


def make_spec(folder: Path, certificates: Path, redis: str, sink: str) -> StackSpec:
    """A prefill and a decode replica; every prompt of some pages goes to both."""
    keys = folder / "keys.yaml"
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("alice", "bob")}
    keys.write_text(
        f"keys:\n- {{name: alice, sha256: {digests['alice']}}}\n"
        f"- {{name: bob, sha256: {digests['bob']}, requests_per_minute: {FEW}}}\n"
    )
    flags: dict[str, dict[str, str | bool]] = {
        "router": {
            "pd-least-tokens": "16",
            "pd-threshold-tokens": "16",
            "pd-by-rates": False,
            "metrics-compat": "vllm",
            "api-key-file": str(keys),
            "redis": redis,
        },
        "scheduler": {"metrics-compat": "vllm", "kvstore-timeout-ms": "20000"},
        "worker": {"served-model-name": "demo"},
        "kvstore": {"disk-path": str(folder / "pages"), "disk-bytes": str(64 << 20), "redis-url": redis},
    }
    for service in SERVICES:
        flags.setdefault(service, {})["otlp-traces-endpoint"] = sink
    spec = StackSpec(
        "observe",
        str(find_model(None)),
        replicas=0,
        prefill=1,
        decode=1,
        tls_folder=str(certificates),
        drain_timeout_s=5.0,
        flags=flags,
    )
    ports = free_ports(len(spec.members))
    for name, port in zip(spec.members, ports, strict=True):
        flags[name] = {**flags.get(name, {}), "metrics-listen": f"127.0.0.1:{port}"}
    return spec


@contextlib.contextmanager
def load(observed: Observed) -> Iterator[None]:
    """Some requests in a row, again and again, of two keys; one of them sends too many."""
    stop, failures = threading.Event(), list[str]()

    def run() -> None:
        count = 0
        with client(observed) as http:
            while not stop.is_set():
                count += 1
                # Whatever is sent twice is found; a new beginning is computed, and sent from worker to worker.
                prompt = PROMPT if count % 3 == 0 else f"{count} {PROMPT}"
                answer = http.post("/v1/completions", json=body(prompt), headers=bearer("alice"))
                if answer.status_code != 200:
                    failures.append(answer.text)
                http.post("/v1/completions", json=body("A", max_tokens=2), headers=bearer("bob"))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures, failures[:3]


def client(observed: Observed) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(observed.certificates / "public-ca.pem"))
    return httpx.Client(base_url=observed.stack.ready.http, verify=context, timeout=LIMIT_S)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


def concrete(expression: str) -> str:
    """The expression as Grafana sends it, for all models and the last twenty seconds."""
    return expression.replace("$__rate_interval", "20s").replace("$model", ".*")


@pytest.mark.parametrize(("expression", "everywhere"), PANELS)
def test_every_panel_has_data(observed: Observed, expression: str, everywhere: bool) -> None:
    series = observed.prometheus.query(concrete(expression))
    assert has_data(series) or not everywhere, f"{expression} yields {series}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_is_understood_and_selects_series(observed: Observed, alert: dict[str, str]) -> None:
    (rule,) = (rule for rule in observed.prometheus.rules() if rule["name"] == alert["alert"])
    assert rule["health"] == "ok" and not rule.get("lastError")
    assert rule["state"] == "inactive" or alert["alert"] in ("QuireShedding",), rule["alerts"]
    for selector in re.findall(r"\b(?:quire_\w+|up|process_\w+)(?:\{[^}]*\})?", alert["expr"]):
        name = selector.split("{")[0]
        counted = name.removesuffix("_bucket")
        if not has_data(observed.prometheus.query(selector)):
            bare = has_data(observed.prometheus.query(name))  # series are there, but of other outcomes
            assert bare or name in ONLY_AFTER_FAILURES, f"{selector} selects nothing"
            assert counted in observed.prometheus.metric_names()


def test_every_metric_of_an_expression_is_described_by_a_target(observed: Observed) -> None:
    described = observed.prometheus.metric_names()
    # In OpenMetrics, a counter is described without its `_total`.
    ends = ("", "_total", "_bucket", "_count", "_sum")
    known = {f"{name}{end}" for name in described for end in ends} | {"up"}
    missing = {name for _, expression in expressions() for name in metrics_of(expression)} - known
    assert not {name for name in missing if not name.startswith(ONLY_WITH_GPU)}


def test_promtool_accepts_the_configuration_and_the_tests_of_rules() -> None:
    for arguments in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            [binary("promtool"), *arguments], cwd=OBSERVABILITY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alias_equals_its_source_under_load(observed: Observed) -> None:
    for member in ("router", "scheduler-prefill-1", "scheduler-decode-1"):
        samples, names = parse(observed.scrape(member)), table_of(service_of(member))
        assert alias_differences(samples, names) == []
        assert len({name for name in samples if name.startswith("vllm:")}) >= len(names)


def test_a_request_is_one_trace_over_all_services_and_both_replicas(observed: Observed) -> None:
    with client(observed) as http:
        headers = {**bearer("alice"), "traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert http.post("/v1/completions", json=body(f"Once. {PROMPT}"), headers=headers).status_code == 200

    def whole(spans: list[SinkSpan] | tuple[SinkSpan, ...]) -> bool:
        mine = [span for span in spans if span.trace_id == TRACE]
        services = {span.service.removeprefix("quire-") for span in mine}
        # A service exports a span when it ends, so children come before their parents.
        complete = {PARENT} <= {span.parent_id for span in mine} <= {PARENT, *(span.span_id for span in mine)}
        schedulers = {span.instance for span in mine if span.name == "scheduler.request"}
        return complete and services == set(SERVICES) and len(schedulers) == 2

    spans = [
        span for span in observed.sink.wait_for(lambda spans: whole(list(spans)), LIMIT_S) if span.trace_id == TRACE
    ]
    ids = {span.span_id for span in spans}
    (root,) = (span for span in spans if span.parent_id == PARENT)
    assert root.service == "quire-router" and "first token" in root.events
    assert all(span.parent_id in ids or span is root for span in spans), "one tree"


def test_tenants_are_named_as_their_keys(observed: Observed) -> None:
    tenants = {dict(one.labels)["tenant"] for one in observed.prometheus.query("quire_router_tenant_requests_total")}
    assert tenants == {"alice", "bob"}
    (shed,) = observed.prometheus.query('quire_router_shed_total{tenant="bob"}')
    assert shed.labels["reason"] == "RATE_LIMITED" and shed.value > 0


def test_dashboards_are_json_that_names_their_queries() -> None:
    for file in sorted((OBSERVABILITY / "dashboards").glob("*.json")):
        board = json.loads(file.read_text())
        assert board["title"].startswith("Quire / ") and all(panel["targets"] for panel in board["panels"])
