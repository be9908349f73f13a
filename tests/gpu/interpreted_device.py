"""InterpretedDevice: a Device that runs the GPU's step inside the launch, kernel by kernel, under Triton's interpreter.

For machines without a GPU, and tiny models: slow, but it shows that what runs on a GPU is right in itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from quire_common.credit import Finish
from quire_worker.cuda.host_rows import HostRows
from quire_worker.cuda.isolated_steps import run_isolated
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.cuda.masks.held_rows import pop_held, send_tokens
from quire_worker.cuda.repetition_watch import RepetitionWatch
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_extras import StepExtras
from quire_worker.cuda.step_layout import STOP_IDS, StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.spec import EngineSpec
from quire_worker.engine.step_runner import failed_samples
from quire_worker.model.decoder import Decoder
from quire_worker.step import DeviceTiming, StepBatch

_WORDS = 1 << 20
_PADDING = 1
"""Rows and sequences that a step has too many of, as those have that were captured for more."""


class InterpretedDevice:
    """Implements Device."""

    def __init__(self, decoder: Decoder[Any], pages: torch.Tensor, spec: EngineSpec) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._tiling = Tiling.of(decoder.head_shape, pages.device)
        masks = None
        if spec.masks is not None:
            masks = DeviceMasks(spec.masks, pages.device, spec.num_slots, 4 * spec.num_slots)
        self._body = StepBody(decoder, pages, _WORDS, spec.num_slots, 4 * spec.num_slots, masks)
        self._states = LogitsStates(pages.device, decoder.spec.vocab_size)
        self._host_rows = HostRows(spec.logits_processors)
        self._extras = StepExtras(pages.device, 1, decoder.logits, _examine)
        self._repetition = RepetitionWatch()
        self._ended: list[StepOutcome] = []

    def launch(self, batch: StepBatch) -> None:
        self._body.advanced = False
        try:
            outcome = self._run(batch)
        except Exception as error:
            again = not self._body.advanced
            outcome = run_isolated(batch, error, self._run, _examine, again=again)
        self._ended.append(outcome)
        self.wake()

    def _run(self, batch: StepBatch) -> StepOutcome:
        decodes = int(batch.fed.sum())
        chunks = len(batch.count) - decodes
        more = _PADDING if chunks else 0
        controlled = any(each.changes_logits and not each.runs_python for each in batch.controls.values())
        size = StepSize(
            decodes + _PADDING,
            len(batch.token) - decodes + more,
            chunks + more,
            filtered=True,
            controlled=controlled,
            masked=bool(batch.constraints),
        )
        stops = batch.stop_id.shape[1] if batch.stop_id.ndim == 2 else 0
        layout = StepLayout.of(size, self._tiling, max(STOP_IDS, stops))
        # What was there before is not zero on a GPU either.
        host = np.full(_WORDS, 12345, np.int32)
        used = layout.pack(batch, host, self._states.addresses(batch))
        body = self._body
        body.uploaded.copy_(torch.from_numpy(host))
        body.results.fill_(12345)
        places = np.arange(len(batch.count), dtype=np.int32)
        places[decodes:] += _PADDING
        python = any(each.runs_python for each in batch.controls.values())
        edit = partial(self._host_rows.edit, batch, places) if python else None
        hidden = body.launch(layout, edit, all_rows=bool(batch.scores))
        results = body.results.numpy()
        if used > _WORDS or body.logits is None:
            raise RuntimeError("the step does not fit")
        token = results[: size.sequences][places]
        finish = results[size.sequences : 2 * size.sequences][places].astype(np.uint8)
        finish[batch.last & ~batch.sample] = Finish.LIMIT
        extras = self._extras.start(batch, places, body.logits, body.results, hidden)
        failed = failed_samples(batch, token) | extras.failed
        self._repetition.end(batch, token, finish)
        held = pop_held(batch, token)
        if failed:
            token[list(failed)] = -1
            finish[list(failed)] = Finish.ERROR
        send_tokens(batch, token, finish)
        logprobs, scores = extras.logprob_columns(token), extras.score_columns()
        return StepOutcome(token[:, None], finish, failed, logprobs, DeviceTiming(0, 0, 0), 0, scores, held=held)

    def prepare(self) -> bool:
        """There is nothing to do ahead."""
        return False

    def take_outcomes(self) -> list[StepOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        self._ended = []
        self._states.clear()
        self._host_rows.clear()

    def close(self) -> None: ...


def _examine(_error: Exception) -> None:
    """A CPU does not break."""
