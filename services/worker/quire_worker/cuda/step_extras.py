"""StepExtras: the logprobs that sequences request beside their tokens, of sampled tokens and of prompt tokens.

They are started after the step has sampled, when the step cannot be run again. They take memory and may fail; a failure
then only fails the sequences that requested them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire_common.telemetry.logs import get_logger
from quire_worker.cuda.device_logprobs import DeviceLogprobs
from quire_worker.cuda.device_scores import start_scores
from quire_worker.cuda.isolated_steps import launch_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import Tensor

    from quire_common.credit import LogprobColumns
    from quire_common.errors import QuireError
    from quire_worker.arrays import Int32
    from quire_worker.cuda.device_logprobs import PendingLogprobs
    from quire_worker.cuda.device_scores import PendingScores
    from quire_worker.step import StepBatch

log = get_logger(__name__)


@dataclass(slots=True)
class PendingExtras:
    """Logprobs that are being computed and copied to the host. They are complete once the step's event is."""

    logprobs: PendingLogprobs | None = None
    scores: PendingScores | None = None
    failed: dict[int, QuireError] = field(default_factory=dict)
    """By sequence of the batch."""

    def logprob_columns(self, token: Int32) -> LogprobColumns | None:
        """Logprobs of the tokens [S] that sequences sampled, as columns; None if there are none."""
        return None if self.logprobs is None else self.logprobs.columns(token)

    def score_columns(self) -> dict[int, LogprobColumns]:
        """By sequence, the logprobs of its prompt tokens."""
        return {} if self.scores is None else self.scores.columns()


class StepExtras:
    """Belongs to the model thread. `turns` as in DeviceLogprobs. `examine` raises where an error is the device's
    own."""

    def __init__(
        self,
        device: torch.device,
        turns: int,
        logits_of: Callable[[Tensor], Tensor],
        examine: Callable[[Exception], None],
    ) -> None:
        self._of_draws = DeviceLogprobs(device, turns)
        self._logits_of = logits_of
        self._examine = examine

    def start(
        self, batch: StepBatch, places: Int32, logits: Tensor | None, token: Tensor, hidden: Tensor | None
    ) -> PendingExtras:
        """Begin to compute the logprobs that the batch asks for, after the step that was launched last. `logits` [N, V]
        and `token` [N] are those of that step; `places` [S] has the row of each sequence. `hidden` [R, H] are the
        hidden rows of a step with prompt logprobs, whose computation overwrites the step's logits. A failure fails only
        the sequences that asked; an error of the device itself is raised."""
        extras = PendingExtras()
        asked = ((batch.logprobs >= 0) & batch.sample).nonzero()[0].astype(np.int32)
        if len(asked) and logits is not None:
            with _attribute_failures(asked.tolist(), extras.failed, self._examine):
                extras.logprobs = self._of_draws.start(logits, token, places[asked], asked, batch.logprobs[asked])
        # Behind the logprobs, since these overwrite the step's logits.
        if batch.scores and hidden is not None:
            with _attribute_failures(batch.scores, extras.failed, self._examine):
                first = batch.count.cumsum(dtype=np.int32) - batch.count + places - np.arange(len(places))
                extras.scores = start_scores(hidden, self._logits_of, batch, first.astype(np.int32))
        return extras


@contextlib.contextmanager
def _attribute_failures(
    sequences: Iterable[int], failed: dict[int, QuireError], examine: Callable[[Exception], None]
) -> Iterator[None]:
    """In this context, an exception is logged and becomes the error of these sequences in `failed`. If the error is the
    device's own, `examine` raises."""
    try:
        yield
    except Exception as error:
        examine(error)
        log.exception("logprobs of a step could not be launched")
        failed.update(dict.fromkeys(sequences, launch_error(error)))
