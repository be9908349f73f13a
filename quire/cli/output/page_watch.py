"""PageWatch: computes which pages a request moved, from reports of the stack's services: the request's timings, the
workers' metrics and the model's page geometry. The stack must serve only one request at a time meanwhile."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cli.output.page_flow import PageFlow, find

if TYPE_CHECKING:
    from quire.local.stack import LocalStack
    from quire.outputs import HopTiming

_LIMIT_S = 10.0
_PULLED = re.compile(
    r'^quire_worker_mover_pages_total\{kind="pull",(?:.*,)?transport="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE
)


class PageWatch:
    """Watches the pages of one stack, whose workers must have the option `metrics-listen`. The constructor asks each
    worker for its metrics, and a scheduler for the size of a page."""

    def __init__(self, stack: LocalStack) -> None:
        spec, state = stack.spec, stack.directory.read()
        if state is None:
            raise AssertionError("a stack that is up has its state on disk")
        self._metrics = {name: str(spec.flags[name]["metrics-listen"]) for name in spec.members_of("worker")}
        self._seen = {name: self._pulled(name) for name in self._metrics}
        scheduler = spec.members_of("scheduler")[0]
        self._page_bytes = _page_bytes(f"{spec.reached_at(scheduler)}:{state.services[scheduler].port}")

    def flow(self, tokens: int, timings: Sequence[HopTiming], first_ms: float, second_ms: float) -> PageFlow:
        """Return the page flow of the request that has just ended, from its timings. The transports are those whose
        page counts in the workers' metrics have increased since the last call. `tokens` is the prompt's length;
        `first_ms` is the time to the first token, and `second_ms` the time from it to the second."""
        apart, pull = find(timings, "prefill worker", "prefill"), find(timings, "transfer", "pull")
        own = find(timings, "worker", "decode") or find(timings, "scheduler", "queue")
        decode = own.instance if own is not None else ""
        prefill = apart or find(timings, "worker", "prefill")
        return PageFlow(
            tokens=tokens,
            prefill=_short(apart.instance) if apart is not None else "",
            decode=_short(decode),
            pages=pull.count if pull is not None else 0,
            page_bytes=self._page_bytes,
            transport=self._transport(),
            prefill_ms=prefill.us / 1e3 if prefill is not None else 0.0,
            transfer_ms=pull.us / 1e3 if pull is not None else 0.0,
            first_ms=first_ms,
            second_ms=second_ms,
        )

    def _transport(self) -> str:
        """Return the names of the transports by which workers pulled pages since the last call, sorted, with commas
        between them. Asks every worker, and keeps the counts for the next call."""
        used = set[str]()
        for name, before in self._seen.items():
            self._seen[name] = now = self._pulled(name)
            used |= {transport for transport, pages in now.items() if pages > before.get(transport, 0.0)}
        return ", ".join(sorted(used))

    def _pulled(self, worker: str) -> dict[str, float]:
        """Return the number of pages that a worker has pulled by each transport, from its metrics."""
        with urllib.request.urlopen(f"http://{self._metrics[worker]}/metrics", timeout=_LIMIT_S) as answer:
            return {name: float(pages) for name, pages in _PULLED.findall(answer.read().decode())}


def _page_bytes(scheduler: str) -> int:
    """Ask a scheduler for the bytes of a page over all KV groups. Raises grpc.RpcError if it does not answer in
    time."""
    import grpc

    from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

    with grpc.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=_LIMIT_S)
    return sum(group.page_bytes for group in answer.model.pages.groups)


def _short(instance: str) -> str:
    """Return the short name of a member: `prefill-1` for `scheduler-prefill-1`."""
    return instance.removeprefix("scheduler-")
