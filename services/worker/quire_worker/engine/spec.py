"""The fixed settings of an engine: its sizes, and the logits processors that requests may name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from quire_common.sequence import MAX_STOP_TOKEN_IDS

if TYPE_CHECKING:
    from quire_worker.matcher.mask_ring import MaskRing
    from quire_worker.sampling.logits_processor import LogitsProcessors

SLOTS_PER_SEQ = 2.5
# The default of --worker-timeout-s, here and in the scheduler.
STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class EngineSpec:
    """The limits of an engine and of every sequence in it. `num_pages` counts page 0, which is never granted."""

    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    eos_token_ids: tuple[int, ...] = ()
    max_stop_ids: int = MAX_STOP_TOKEN_IDS
    slots: int = 0
    """0: 2.5 for each sequence that decodes."""
    logits_processors: LogitsProcessors = field(default_factory=dict)
    max_row_tokens: int = 1
    """The most tokens that a decode row may sample in one step: 1 + the number of drafts."""
    max_constrained_row_tokens: int = 1
    """The limit of a row whose sequence has a grammar: its drafts are forced tokens."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """A step that takes longer hangs: its device is given up."""
    masks: MaskRing | None = None
    """Memory in which the matcher leaves masks, for devices that read them. None: no sequence has a grammar."""

    @cached_property
    def num_slots(self) -> int:
        """Number of slots: the configured number, or else 2.5 for each sequence that decodes in a step."""
        return self.slots or math.ceil(SLOTS_PER_SEQ * self.max_num_seqs)

    @cached_property
    def table_width(self) -> int:
        """Number of pages of the longest sequence."""
        return math.ceil(self.max_model_len / self.page_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the device has KV pages. Page 0 holds none."""
        return (self.num_pages - 1) * self.page_size

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of the greatest length for which there are pages at once."""
        return (self.num_pages - 1) / self.table_width
