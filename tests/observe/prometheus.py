"""A real Prometheus for tests: the configuration of deploy/observability, short intervals, and a stack's targets."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
# `make observe` unpacks Debian's package here.
UNPACKED = ROOT / "build" / "prometheus" / "usr" / "bin"
LIMIT_S = 120.0
INTERVAL_S = 2


class Series(NamedTuple):
    labels: Mapping[str, str]
    value: float


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    unpacked = UNPACKED / name
    found = str(unpacked) if unpacked.is_file() else shutil.which(name)
    assert found, f"{name} is not there: make observe fetches it"
    return found


class Prometheus:
    """One process on a free port. `targets`: addresses by service. `tls`: the folder of `quire certs`. `key`: an API
    key of the router."""

    def __init__(self, folder: Path, port: int, targets: Mapping[str, Sequence[str]], tls: str, key: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        # Why the last wait is not over.
        self._told: object = ""
        shutil.copy(OBSERVABILITY / "alerts.yml", folder)
        (folder / "targets").mkdir()
        for service, addresses in targets.items():
            (folder / "targets" / f"{service}.yml").write_text(yaml.safe_dump([{"targets": list(addresses)}]))
        config: dict[str, Any] = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{INTERVAL_S}s", "evaluation_interval": f"{INTERVAL_S}s"}
        for job in config["scrape_configs"]:
            job |= _over_tls(job["job_name"].removeprefix("quire-"), Path(tls))
            if job["job_name"] == "quire-router":
                job["authorization"] = {"credentials": key}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            binary("prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        command += [f"--storage.tsdb.path={folder}/data", "--web.console.libraries=", "--web.console.templates="]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ})
        try:
            self._wait(lambda: self._get("/-/ready"))
        except BaseException:
            self.close()
            raise

    def query(self, expression: str) -> list[Series]:
        """The series that an expression yields now. Raises AssertionError with what is wrong with it."""
        found = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))["data"]
        assert found["resultType"] in ("vector", "scalar"), expression
        if found["resultType"] == "scalar":
            return [Series({}, float(found["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in found["result"]]

    def wait_for_targets(self, count: int) -> None:
        """Until so many targets were scraped, and scraped again, so that there are rates."""
        self._wait(lambda: len([one for one in self.query("up") if one.value == 1]) >= count or self._fail_targets())
        time.sleep(3 * INTERVAL_S)

    def metric_names(self) -> set[str]:
        """Every name that some target has described, with series or without; a counter's with its `_total`."""
        found = self._get("/api/v1/metadata?limit=100000")["data"]
        return set(found)

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["data"]["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            raise AssertionError(f"{path}: {error.read().decode()}") from error
        return json.loads(text) if text.startswith("{") else text

    def _fail_targets(self) -> bool:
        """Return False; the assertion of `_wait` tells why targets were not scraped."""
        targets = self._get("/api/v1/targets")["data"]["activeTargets"]
        self._told = [(one["scrapeUrl"], one["lastError"]) for one in targets if one["health"] != "up"]
        return False

    def _wait(self, done: Any) -> None:
        self._told = ""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                if done():
                    return
            except OSError as error:
                self._told = error
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, (self._told, self._log.read_text()[-2000:])
            time.sleep(0.3)


def has_data(series: Sequence[Series]) -> bool:
    """Whether there is a number. A quantile of nothing is none."""
    return any(not math.isnan(one.value) for one in series)


def _over_tls(service: str, folder: Path) -> dict[str, Any]:
    """The options of a job whose targets use mutual TLS; the router's ports have the public certificate."""
    if service == "router":
        return {"scheme": "https", "tls_config": {"ca_file": str(folder / "public-ca.pem"), "server_name": "localhost"}}
    files = {"cert_file": "metrics.pem", "key_file": "metrics.key", "ca_file": "ca.pem"}
    paths = {name: str(folder / file) for name, file in files.items()}
    return {"scheme": "https", "tls_config": {**paths, "server_name": f"{service}.quire.internal"}}
