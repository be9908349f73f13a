"""PrefixStack: the five services of one replica as processes. A cache benchmark starts them, empties their caches by
restarts, and reads their counters.

After a restart, a scheduler knows no page on the device, and a kvstore has only the pages of its lower tiers. Both use
their old ports again, so the router finds them.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from bench.harness.processes import Service
from quire import Client, SamplingParams
from quire.outputs import HopTiming

LIMIT_S = 60.0
_METRIC = re.compile(r'^(quire_\w+?)(?:\{(?:[a-z_]+="([^"]*)")?\})? ([0-9.eE+-]+)$', re.MULTILINE)


class Heard(NamedTuple):
    """One answer, and the time until its first event."""

    ttft_ms: float
    tokens: list[int]
    cached_tokens: int
    timings: tuple[HopTiming, ...]


class PrefixStack:
    """A context manager that serves when entered. `kvstore`: flags of a kvstore; None: there is none."""

    def __init__(
        self,
        model: Path,
        kv_cache_bytes: int,
        kvstore: tuple[str, ...] | None = None,
        scheduler: tuple[str, ...] = (),
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._metrics = {name: _free_port() for name in ("scheduler", "kvstore")}
        self._scheduler_flags, self._kvstore_flags = scheduler, kvstore
        self.scheduler: Service
        self.kvstore: Service
        self._model = model
        self._kv_cache_bytes = kv_cache_bytes

    def __enter__(self) -> PrefixStack:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ask(self, prompt: list[int], answer: int) -> Heard:
        """Send one greedy request while no other runs."""
        began, first, tokens, timings, cached = time.perf_counter(), 0.0, list[int](), list[HopTiming](), 0
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        for delta in self._client.generate(prompt, params, return_token_ids=True, return_timings=True):
            if delta.token_ids and not first:
                first = time.perf_counter()
            tokens += delta.token_ids
            timings += delta.timings
            cached = delta.usage.cached_tokens if delta.usage is not None else cached
        return Heard((first - began) * 1e3, tokens, cached, tuple(timings))

    def forget_device(self) -> None:
        """Make the scheduler forget all pages on the device."""
        address = self.scheduler.address()
        self.scheduler.stop()
        self.scheduler = self._enter("scheduler", *self._scheduler_command(), listen=address)

    def restart_kvstore(self, *flags: str) -> None:
        """Restart the kvstore. Its memory is then empty; of its lower tiers, it has those that the flags name."""
        address = self.kvstore.address()
        self.kvstore.stop()
        self._kvstore_flags = flags
        self.kvstore = self._enter("kvstore", *flags, *self._metrics_flag("kvstore"), listen=address)

    def count(self, service: str, metric: str, label: str = "") -> float:
        """Return a counter or gauge of the scheduler or the kvstore, for one label or the sum of all."""
        address = f"http://127.0.0.1:{self._metrics[service]}/metrics"
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        return sum(
            float(value)
            for name, of, value in _METRIC.findall(text)
            if name == f"quire_{service}_{metric}" and (not label or of == label)
        )

    def until_stored(self, pages: int) -> None:
        """Wait until the kvstore has this many pages, in memory and in all tiers below it."""
        tiers = [
            "ram",
            *(m for m in ("disk", "redis") if any(flag.startswith(f"--{m}") for flag in self._kvstore_flags or ())),
        ]
        deadline = time.monotonic() + LIMIT_S
        while min(self.count("kvstore", "tier_stored_total", tier) for tier in tiers) < pages:
            if time.monotonic() > deadline:
                stored = {tier: self.count("kvstore", "tier_stored_total", tier) for tier in tiers}
                raise RuntimeError(f"{pages} pages should be stored, and are: {stored}")
            time.sleep(0.05)

    def _start(self) -> None:
        worker = self._enter(
            "worker", f"--model={self._model}", f"--kv-cache-memory-bytes={self._kv_cache_bytes}",
            "--max-num-seqs=8", "--torch-threads=1", *self._worker_kvstore(),
        )  # fmt: skip
        self._worker = worker.ready()
        self.scheduler = self._enter("scheduler", *self._scheduler_command())
        tokenizer = self._enter("tokenizer", f"--model={self._model}")
        router = self._enter(
            "router", f"--schedulers={self.scheduler.ready()}", f"--tokenizers={tokenizer.ready()}", "--port=0"
        )
        self._client = self._stack.enter_context(Client(router.ready()))

    def _worker_kvstore(self) -> tuple[str, ...]:
        if self._kvstore_flags is None:
            return ()
        self.kvstore = self._enter("kvstore", *self._kvstore_flags, *self._metrics_flag("kvstore"))
        return (f"--kvstore={self.kvstore.ready()}",)

    def _scheduler_command(self) -> tuple[str, ...]:
        store = () if self._kvstore_flags is None else (f"--kvstore={self.kvstore.address()}",)
        return (f"--worker={self._worker}", *store, *self._metrics_flag("scheduler"), *self._scheduler_flags)

    def _metrics_flag(self, service: str) -> tuple[str, ...]:
        return (f"--metrics-listen=127.0.0.1:{self._metrics[service]}",)

    def _enter(self, name: str, *flags: str, listen: str = "127.0.0.1:0") -> Service:
        service = self._stack.enter_context(Service(name, *flags, listen=listen))
        service.ready()
        return service


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
