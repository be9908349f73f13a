"""CudaDevice: a Device whose steps run on a CUDA stream, launched before the results of earlier steps are known.

A launch packs the batch into pinned memory and uploads it. Then it replays the graph of the step's size, or launches
the kernels one by one, and enqueues the download of the results. A thread waits for the results, so that the model
thread does so only after a failed launch and in `drain`. The device still reads the pinned buffers after the launch has
returned, so they form a ring with more buffers than steps in flight. If a launch raises, the sequences of the step are
run one by one (see isolated_steps.py). An error of CUDA itself ends the device.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire_common.credit import Finish
from quire_common.errors import Internal
from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.host_rows import HostRows
from quire_worker.cuda.isolated_steps import run_isolated
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.masks.held_rows import pop_held, send_tokens
from quire_worker.cuda.repetition_watch import RepetitionWatch
from quire_worker.cuda.step_columns import StepColumns, is_next_step
from quire_worker.cuda.step_extras import StepExtras
from quire_worker.cuda.step_layout import STOP_IDS, StepLayout, Tiling
from quire_worker.cuda.step_size import MOST_PADDED_ROWS, StepSize
from quire_worker.engine.device import CLOSE_LIMIT_S, StepClock, broken, poll_until
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.spec import STEP_TIMEOUT_S
from quire_worker.engine.step_runner import failed_samples
from quire_worker.ops.triton.fresh_attention import LEAST_TOKENS, Fresh
from quire_worker.step import DeviceTiming

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.arrays import Int32
    from quire_worker.cuda.graphs.step_graph import StepGraph
    from quire_worker.cuda.graphs.step_graph_cache import StepGraphCache
    from quire_worker.cuda.step_body import Edit, StepBody
    from quire_worker.cuda.step_extras import PendingExtras
    from quire_worker.ops.triton.fresh_attention import FreshPlans
    from quire_worker.sampling.logits_processor import LogitsProcessors
    from quire_worker.step import StepBatch

log = get_logger(__name__)
_RING = 4


class _StepPlan(NamedTuple):
    """The graph that launches a step (None: kernel by kernel), the layout by which the step is packed, and for each
    sequence of the batch the row of its results."""

    graph: StepGraph | None
    layout: StepLayout
    places: Int32


@dataclass(slots=True)
class _InFlightStep:
    """A launched step, and the place of its results."""

    batch: StepBatch
    sequences: int
    """With padding."""
    places: Int32
    """Row of the results by sequence of the batch."""
    results: torch.Tensor
    done: torch.cuda.Event
    extras: PendingExtras
    prepare_us: int
    launched_ns: int
    """time.perf_counter_ns() when its kernels were in the stream."""


class _PartCopy:
    """Copies the first words of one buffer to another one, on the current stream. Views are kept from one copy to the
    next, since making four of them takes a tenth of a short step's launch."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target = target
        self._source = source
        self._views = target[:0], source[:0]

    def start(self, words: int) -> None:
        """Start to copy so many words."""
        if len(self._views[0]) != words:
            self._views = self._target[:words], self._source[:words]
        target, source = self._views
        target.copy_(source, non_blocking=True)


class CudaDevice:
    """Implements Device. If `graphs` is None, every step is launched kernel by kernel (`--enforce-eager`); otherwise
    only steps for which `_find` has no graph are. If `fresh` is None, attention computes all prompts in tiles."""

    def __init__(
        self,
        body: StepBody,
        tiling: Tiling,
        graphs: StepGraphCache | None,
        stream: torch.cuda.Stream,
        fresh: FreshPlans | None,
        processors: LogitsProcessors,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._body = body
        self._tiling = tiling
        self._graphs = graphs
        self._stream = stream
        self._fresh = fresh
        words, results = body.uploaded.shape[0], body.results.shape[0]
        pinned = [torch.zeros(words, dtype=torch.int32).pin_memory() for _ in range(_RING)]
        self._columns = [StepColumns(buffer.numpy()) for buffer in pinned]
        self._results = [torch.zeros(results, dtype=torch.int32).pin_memory() for _ in range(_RING)]
        self._uploads = [_PartCopy(body.uploaded, each) for each in pinned]
        self._downloads = [_PartCopy(each, body.results) for each in self._results]
        self._done = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]  # torch's
        self._turn = 0
        # The last step that was not like the one before it.
        self._planned: tuple[StepBatch, _StepPlan] | None = None
        self._states = LogitsStates(body.pages.device, body.decoder.spec.vocab_size)
        self._extras = StepExtras(body.pages.device, _RING, body.decoder.logits, self._examine)
        self._host_rows = HostRows(processors)
        self._repetition = RepetitionWatch()
        self._clock = StepClock(step_timeout_s)
        self._launched: queue.SimpleQueue[_InFlightStep | threading.Event | None] = queue.SimpleQueue()
        self._ended: deque[StepOutcome] = deque()
        self._broken: Internal | None = None
        self._last_end_ns = time.perf_counter_ns()
        self._thread = threading.Thread(target=self._main, name="results", daemon=True)
        self._thread.start()

    def launch(self, batch: StepBatch) -> None:
        """Launch a step; its results are waited for on a thread. If the launch raises, wait for the steps before, run
        each sequence alone here and now (a step of one sequence just fails; all fail if tokens may have been fed back
        already), keep the outcome and call `wake`. Only after a failed launch does this raise: DEVICE_BROKEN if the GPU
        itself has failed, DEVICE_HUNG if a step takes too long."""
        try:
            in_flight = self._launch(batch)
        except Exception as error:
            self._examine(error)
            self._await_results()
            again = not self._body.advanced
            self._ended.append(run_isolated(batch, error, self._run_alone, self._examine, again=again))
            self.wake()
        else:
            self._clock.note_launch()
            self._launched.put(in_flight)

    def _launch(self, batch: StepBatch) -> _InFlightStep:
        """Pack a step into the next pinned buffer and upload it, replay its graph or launch its kernels one by one, and
        enqueue the download of its results; returns the step in flight. Raises whatever the launch raises. `advanced`
        of the body then says whether the step may have fed tokens back."""
        begin = time.perf_counter_ns()
        turn, self._turn = self._turn, (self._turn + 1) % _RING
        body, hidden = self._body, None
        try:
            graph, layout, places = self._plan_step(batch)
        finally:
            body.advanced = False  # what was launched until here, a capture's step of nobody too, is not this step
        count, done = 2 * layout.size.sequences, self._done[turn]
        with torch.cuda.stream(self._stream):
            control = self._states.addresses(batch) if layout.size.controlled else {}
            used = self._columns[turn].pack(layout, batch, control)
            self._uploads[turn].start(used)
            if graph is None:
                hidden = body.launch(layout, self._edit(batch, places), all_rows=bool(batch.scores))
            else:
                graph.replay(layout)
            self._downloads[turn].start(count)
            logits = body.logits if graph is None else graph.logits
            extras = self._extras.start(batch, places, logits, body.results, hidden)
            done.record(self._stream)
        launched_ns = time.perf_counter_ns()
        prepare_us = (launched_ns - begin) // 1000
        results = self._results[turn]
        return _InFlightStep(batch, layout.size.sequences, places, results, done, extras, prepare_us, launched_ns)

    def _run_alone(self, batch: StepBatch) -> StepOutcome:
        """Launch a step and wait for its outcome. Raises DEVICE_HUNG if the step takes too long."""
        in_flight = self._launch(batch)
        self._poll(in_flight.done.query)
        return self._outcome(in_flight)

    def _examine(self, error: Exception) -> None:
        """Return if the step itself has caused a launch's error, after resetting the counters of masks. Waits for the
        streams. If this wait fails, or the error is torch's AcceleratorError, the GPU has failed: mark the device as
        broken and raise DEVICE_BROKEN. If the wait takes too long, raise DEVICE_HUNG. A device that is marked already
        raises its error again."""
        self._check()
        try:
            self._poll(self._stream.query)
            if self._body.masks is not None:
                self._body.masks.reset(self._poll)
            sound = not isinstance(error, torch.AcceleratorError)
        except RuntimeError:
            sound = False
        if not sound:
            self._broken = broken()
            raise self._broken from error

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Wait on the model thread until `is_done` returns True. If a step takes too long, mark the device as broken
        and raise DEVICE_HUNG."""
        try:
            self._clock.poll(is_done)
        except Internal as hung:
            self._broken = hung
            raise

    def _await_results(self) -> None:
        """Wait until the results of all launched steps are there. Raises DEVICE_HUNG if a step takes too long,
        DEVICE_BROKEN if the device is broken."""
        reached = threading.Event()
        self._launched.put(reached)
        self._clock.await_steps(reached)
        self._check()

    def _edit(self, batch: StepBatch, places: Int32) -> Edit | None:
        """Return the function that changes logits on the host in this step; None if no row needs Python."""
        if not _runs_python(batch):
            return None
        return partial(self._host_rows.edit, batch, places)

    def prepare(self) -> bool:
        """Capture one missing graph and, if none is left then, plan one prompt length for cuDNN; returns whether more
        may be left. If this fails, that is logged. The device then prepares and captures nothing any more: steps
        without a graph run kernel by kernel, and attention computes all prompts in tiles, even those of a planned
        length."""
        try:
            return self._prepare()
        except Exception:  # out of memory, a kernel that cannot be compiled; a GPU that is broken says so again
            log.exception("what was put off could not be made; such steps run kernel by kernel")
            self._give_up()
            return False

    def _give_up(self) -> None:
        """Capture nothing more, and leave no more prompts to cuDNN; the graphs that exist stay in use."""
        self._fresh = None
        if self._graphs is not None:
            self._graphs.give_up()

    def _prepare(self) -> bool:
        """Capture one missing graph and, if none is left then, make one cuDNN plan; returns whether more may be left.
        Before the first plan, a step of padding is launched (see _launch_nobody). An error of the capture or of the
        plan is raised."""
        if self._graphs is not None and self._graphs.capture(1):
            return True
        if self._fresh is None:
            return False
        if not self._fresh.begun:
            self._launch_nobody(Fresh(0, LEAST_TOKENS))
        return self._fresh.make()

    def _launch_nobody(self, fresh: Fresh) -> None:
        """Launch a step that consists of padding in the place of one long prompt for cuDNN, so that the kernels of such
        steps are compiled. `fresh` is that prompt; the step has its rows."""
        layout = StepLayout.of(StepSize(0, fresh.padded, 1), self._tiling).leaving((fresh,), 1)
        with torch.cuda.stream(self._stream):
            layout.pack_nobody(self._body.uploaded)
            self._body.launch(layout)

    def take_outcomes(self) -> list[StepOutcome]:
        """Return the outcomes of the steps that have ended since the last call, in the order of their launch. Raises
        DEVICE_BROKEN if the GPU has failed."""
        self._check()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self) -> None:
        """Wait until all launched steps have ended, forget their outcomes, and drop all logits processor states. Raises
        DEVICE_HUNG if a step takes too long, DEVICE_BROKEN if the device is broken."""
        self._await_results()
        self._ended.clear()
        self._states.clear()
        self._host_rows.clear()

    def close(self) -> None:
        """End the results thread, waiting CLOSE_LIMIT_S for it at most. If it has ended and there is a matcher's ring,
        wait as long for the stream, and give the ring back. An error of the stream is ignored. If the stream hangs, the
        ring is not given back."""
        self._launched.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        if self._body.masks is not None and not self._thread.is_alive():
            try:
                with contextlib.suppress(RuntimeError):  # a GPU that has failed reads nothing any more
                    poll_until(self._stream.query, CLOSE_LIMIT_S)
            except Internal:
                return
            self._body.masks.close()

    def _plan_step(self, batch: StepBatch) -> _StepPlan:
        """Decide how a step is launched: by which graph, and in which layout. The plan of an earlier step is used again
        while the same sequences decode, unless a sequence has a logits processor state or stop ids that are still
        blocked (see is_next_step)."""
        if self._planned is None or batch.controls or not is_next_step(self._planned[0], batch):
            graph, layout = self._find(batch)
            self._planned = batch, _StepPlan(graph, layout, _places(batch, layout))
        return self._planned[1]

    def _find(self, batch: StepBatch) -> tuple[StepGraph | None, StepLayout]:
        """Find a graph that suits the step, which may be captured now, and the layout by which the step is packed for
        it. Without a graph (None) the layout is for a launch kernel by kernel.

        Steps with prompt logprobs, logits processors in Python or more than STOP_IDS stop ids have no graph. cuDNN
        computes long prompts in large steps and in steps without a graph.
        """
        size, fresh = _size_of(batch), self._find_fresh(batch)
        stops = batch.stop_id.shape[1] if batch.stop_id.ndim == 2 else 0
        # Rare, and needs what a graph does not have: hidden rows of the prompt, or a stop before sampling.
        needs_more = batch.scores or _runs_python(batch) or stops > STOP_IDS
        if self._graphs is not None and not needs_more:
            # Smaller steps are better off as one graph, with tiles.
            apart = fresh if size.rows > MOST_PADDED_ROWS else ()
            graph = self._find_graph(self._graphs, _padded(size, apart), fresh=bool(apart))
            if graph is not None:
                return graph, graph.layout_of(apart, size.chunks)
        layout = StepLayout.of(_padded(size, fresh), self._tiling, max(STOP_IDS, stops))
        return None, layout.leaving(fresh, size.chunks) if fresh else layout

    def _find_graph(self, graphs: StepGraphCache, size: StepSize, *, fresh: bool) -> StepGraph | None:
        """Return a captured step that suits this size, captured now if need be; None if no graph suits. `fresh`: the
        step has prompts that cuDNN computes, so only steps captured in pieces suit. If a capture fails, that is logged.
        From then on the device captures nothing and leaves no prompts to cuDNN, and only existing graphs are
        searched."""
        try:
            return graphs.find(size, fresh=fresh)
        except Exception:  # as in `prepare`
            log.exception("a step could not be captured; such steps run kernel by kernel")
            self._give_up()
            return graphs.find(size, fresh=fresh)

    def _find_fresh(self, batch: StepBatch) -> tuple[Fresh, ...]:
        """Return the chunks that are left to cuDNN: those of at least LEAST_TOKENS tokens that begin at position 0.
        There are none without `fresh` plans. Their rows count from the first row that prefills."""
        if self._fresh is None:
            return ()
        chosen = ((batch.position == 0) & (batch.count >= LEAST_TOKENS)).nonzero()[0]
        first = batch.count.cumsum() - batch.count - np.count_nonzero(batch.fed)
        return tuple(Fresh(int(first[each]), int(batch.count[each])) for each in chosen)

    def _main(self) -> None:
        """On the results thread, wait for launched steps in order, and call `wake` after each. If the item is an Event,
        set it when its turn comes. Ends at None. A broken device skips its steps."""
        while (item := self._launched.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._broken is None:
                self._end(item)
                self._clock.note_end()
                self.wake()

    def _end(self, in_flight: _InFlightStep) -> None:
        """Wait for a step's results and keep its outcome; an exception is logged and marks the device as broken."""
        try:
            self._ended.append(self._outcome(in_flight))
        except Exception:
            # An error of CUDA stays with the process: nothing can run here any more.
            log.exception("the GPU failed; it runs nothing more")
            self._broken = broken()

    def _check(self) -> None:
        """Raise DEVICE_BROKEN if the device is broken."""
        if self._broken is not None:
            raise self._broken

    def _outcome(self, in_flight: _InFlightStep) -> StepOutcome:
        """Wait for a launched step, and make its outcome from the downloaded results: tokens and finish codes by
        sequence, repetitions, held rows, failures, logprobs and times. A failed sequence gets token -1 and finish
        ERROR; one that only prefills gets LIMIT in its last step. Send the tokens of sequences with grammars to the
        matcher."""
        batch = in_flight.batch
        in_flight.done.synchronize()
        wait_us, forward_us = self._step_times(in_flight.launched_ns, time.perf_counter_ns())
        places, sequences = in_flight.places, in_flight.sequences
        results = in_flight.results.numpy()
        token = results[:sequences][places]
        finish = results[sequences : 2 * sequences][places].astype(np.uint8)
        finish[batch.last & ~batch.sample] = Finish.LIMIT
        failed = failed_samples(batch, token) | in_flight.extras.failed
        if batch.controls:
            self._repetition.end(batch, token, finish)
        held = pop_held(batch, token)
        if failed:
            token[list(failed)] = -1
            finish[list(failed)] = Finish.ERROR
        send_tokens(batch, token, finish)
        return StepOutcome(
            token=token[:, None],
            finish=finish,
            failed=failed,
            logprobs=in_flight.extras.logprob_columns(token),
            timing=DeviceTiming(prepare_us=in_flight.prepare_us, forward_us=forward_us, sample_us=0),
            wait_us=wait_us,
            scores=in_flight.extras.score_columns(),
            held=held,
        )

    def _step_times(self, launched_ns: int, ended_ns: int) -> tuple[int, int]:
        """Return the microseconds that the GPU was idle before a step, and the microseconds that it computed the step;
        remember when the step ended.

        If the step was launched while the step before it ran, it begins at that step's end. On an idle GPU it begins
        with its launch.
        """
        began_ns = max(launched_ns, self._last_end_ns)
        idle_ns, self._last_end_ns = began_ns - self._last_end_ns, ended_ns
        return idle_ns // 1000, (ended_ns - began_ns) // 1000


def _size_of(batch: StepBatch) -> StepSize:
    """The size of a step without padding: decode rows, prefill rows and chunks, and whether some row is filtered, has a
    logits processor state on the device, or has a grammar."""
    decodes = int(np.count_nonzero(batch.fed))
    filtered = bool(batch.params["filtered"].any())
    changed = (each.changes_logits and not each.runs_python for each in batch.controls.values())
    controlled = bool(batch.controls) and any(changed)
    masked = bool(batch.constraints)
    return StepSize(decodes, len(batch.token) - decodes, len(batch.count) - decodes, filtered, controlled, masked)


def _runs_python(batch: StepBatch) -> bool:
    return bool(batch.controls) and any(each.runs_python for each in batch.controls.values())


def _padded(size: StepSize, fresh: tuple[Fresh, ...]) -> StepSize:
    """The size with enough prefill rows for the padding of fresh chunks."""
    return replace(size, rows=max([size.rows, *(chunk.row + chunk.padded for chunk in fresh)]))


def _places(batch: StepBatch, layout: StepLayout) -> Int32:
    """For each sequence of the batch, its row of the step's logits and results, in which decode rows are padded."""
    decodes = int(np.count_nonzero(batch.fed))
    places: Int32 = np.arange(len(batch.count), dtype=np.int32)
    places[decodes:] += layout.size.decodes - decodes
    return places
