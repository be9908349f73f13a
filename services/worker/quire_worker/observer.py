"""WorkerObserver: the engine's events as Prometheus metrics and spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_common.sequence import context_to_pb
from quire_common.telemetry import metrics, tracing
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from quire_common.credit import StepTiming
    from quire_worker.engine.ports import SlotTrace
    from quire_worker.step import StepSize
    from quire_worker.step_work import StepWork

log = get_logger(__name__)
STEP_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0)


class WorkerObserver:
    """Called from the model thread. Sampled tokens count as `sampled`, and the tokens of prefill chunks as `prefill`:
    of prompts, and of outputs with which a sequence was started."""

    def __init__(self, work: StepWork | None = None) -> None:
        """`work`: what steps of the model take; None: not counted."""
        self._work = work
        self._steps = metrics.counter("quire_worker_steps_total", "Steps run")
        self._step_seconds = metrics.histogram(
            "quire_worker_step_seconds", "Time of one step, without waiting", buckets=STEP_BUCKETS_S
        )
        self._busy_seconds = metrics.counter(
            "quire_worker_busy_seconds_total", "Time in which the device ran steps; its rate is the utilisation"
        )
        self._flops = metrics.counter(
            "quire_worker_flops_total", "Floating-point operations of steps, by the model's sizes"
        )
        self._bytes = metrics.counter(
            "quire_worker_memory_bytes_total", "Bytes of weights, keys and values of steps, by the model's sizes"
        )
        tokens = metrics.counter("quire_worker_tokens_total", "Tokens, by what was done to them", ("kind",))
        self._prefill, self._sampled = tokens.labels("prefill"), tokens.labels("sampled")
        slots = metrics.gauge("quire_worker_slots", "Slots that hold a sequence, after the last step", ("state",))
        self._running, self._spare = slots.labels("running"), slots.labels("spare")
        self._moved = metrics.counter("quire_worker_pages_moved_total", "Pages that arrived by moves", ("kind",))
        self._move_seconds = metrics.histogram(
            "quire_worker_move_seconds", "Time of a move of pages: from or to the kvstore, or from a worker", ("kind",)
        )
        self._failed = metrics.counter("quire_worker_moves_failed_total", "Moves that did not bring all", ("kind",))

    def step_done(self, timing: StepTiming, size: StepSize, running: int, spare: int) -> None:
        """Update the metrics after a step: its times (microseconds), tokens and work, and how many sequences have
        slots, also those that wait or prefill: up to `max_num_seqs` of them (`running`), and the others, which stand
        by (`spare`)."""
        self._steps.inc()
        self._step_seconds.observe((timing.prepare + timing.forward + timing.sample + timing.copy) / 1e6)
        self._busy_seconds.inc((timing.forward + timing.sample + timing.copy) / 1e6)
        if size.prefill_tokens:
            self._prefill.inc(size.prefill_tokens)
        self._sampled.inc(size.sampled)
        if self._work is not None:
            self._flops.inc(self._work.flops(size))
            self._bytes.inc(self._work.num_bytes(size))
        self._running.set(running)
        self._spare.set(spare)

    def slot_ended(self, trace: SlotTrace) -> None:
        """Record the spans of a sequence that has left its slot, also if it was stopped and may start again, under the
        request's own span: prefill, from start to first token, and decode. Without a first token, there is only the
        prefill span, to the end. Does nothing if tracing is off. An error is logged and not raised."""
        if not tracing.enabled():
            return
        try:
            _record(trace)
        except Exception:  # what is seen of a sequence must not end the run of all
            log.exception("a sequence was not traced")

    def moved(self, kind: MoveKind, pages: int, us: int, ok: bool) -> None:
        """Count the pages that a move brought and its time, and the move as failed unless `ok`."""
        name = kind.name.lower()
        self._move_seconds.labels(name).observe(us / 1e6)
        self._moved.labels(name).inc(pages)
        if not ok:
            self._failed.labels(name).inc()


def _record(trace: SlotTrace) -> None:
    """Record the sequence's prefill span and, if it had a first token, its decode span. If the sequence ended by an
    error, the last of these is marked with the error's code."""
    parent = tracing.extract(context_to_pb(trace.context))
    prefill_end = trace.first_token_ns or trace.ended_ns
    prefilled = {"quire.prompt_tokens": trace.prompt_tokens, "quire.cached_tokens": trace.cached_tokens}
    tracing.record_span(
        "prefill",
        parent,
        trace.started_ns,
        prefill_end,
        prefilled,
        error_type="" if trace.first_token_ns else trace.error_code,
    )
    if trace.first_token_ns:
        decoded = {"quire.output_tokens": trace.output_tokens}
        tracing.record_span("decode", parent, prefill_end, trace.ended_ns, decoded, error_type=trace.error_code)
