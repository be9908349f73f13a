"""RowConstraint: the grammar of one sequence, as the engine has it: where its masks are, and what it has sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from quire_worker.matcher.wire import open_frame_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from quire_common.errors import QuireError
    from quire_common.sequence import Sequence
    from quire_worker.sampling.token_mask import TokenMask

NO_MASK_SLOT = -1


class MaskSource(Protocol):
    """The masks of rows, as the device's thread asks for them: one object for each process of the matcher."""

    def mask_at(self, constraint: RowConstraint, position: int) -> TokenMask | None:
        """See RowConstraint."""

    def keep(self, constraint: RowConstraint, tokens: Many[int]) -> None:
        """See RowConstraint."""

    def flush(self) -> None:
        """Send to the process what its sequences have sampled: once a step."""


class RowConstraint:
    """`mask_at` and `keep` belong to the device's thread. All else is changed by MatcherClient alone, on the
    model thread; `append` under its lock."""

    def __init__(self, sequence: Sequence, grammar: str, generation: int, mask_source: MaskSource) -> None:
        self.grammar = grammar
        self.generation = generation
        """A number from 1, another one for each sequence that ever had a seat."""
        self.first_position = len(sequence.prompt_ids)
        self.output: list[int] = sequence.output_ids.tolist()
        """All that the sequence has sampled: what a process that begins anew replays."""
        self._grammar_bytes = len(grammar.encode())
        self.mask_slot = NO_MASK_SLOT
        self.is_open = False
        """Whether the present process has left a first mask."""
        self.is_held = False
        """Whether a step found its mask missing, and the process has not said since that it is there."""
        self.failure: QuireError | None = None
        self.ended = False
        self.mask_source = mask_source
        """The process that applies its grammar."""

    @property
    def is_ready(self) -> bool:
        """Whether its next mask is there, as far as is known. Without it its row is not worth a place in a step."""
        return self.is_open and not self.is_held

    @property
    def next_position(self) -> int:
        """The position of the next token."""
        return self.first_position + len(self.output)

    def mask_at(self, position: int) -> TokenMask | None:
        """Which tokens may be sampled at this position; None: that is not known yet, and the row is held."""
        return self.mask_source.mask_at(self, position)

    def keep(self, tokens: Many[int]) -> None:
        """Take in the tokens that the sequence has sampled and keeps."""
        self.mask_source.keep(self, tokens)

    def append(self, tokens: Many[int]) -> int:
        """Append sampled tokens to the output; returns the position of the first."""
        position = self.next_position
        self.output.extend(tokens)
        return position

    @property
    def open_bytes(self) -> int:
        """The size of the frame that opens its seat: the grammar, and all that was sampled."""
        return open_frame_bytes(len(self.output), self._grammar_bytes)

    def replay_key(self) -> bytes:
        """Return a digest of all that decides what the matcher does for the sequence: its grammar and its output."""
        found = xxhash.xxh3_128(self.grammar.encode())
        found.update(b"\0" + np.array(self.output, np.int32).tobytes())
        return found.digest()

    def assign_mask_slot(self, mask_slot: int) -> None:
        """Note its seat, which it keeps to its end."""
        self.mask_slot = mask_slot

    def set_open(self, is_open: bool) -> None:
        """Note that the process has left a first mask, or that the process is gone, or begins it anew."""
        self.is_open, self.is_held = is_open, False

    def set_held(self, is_held: bool) -> None:
        """Note that a step found its mask missing, or that this mask has come."""
        self.is_held = is_held

    def fail(self, error: QuireError) -> None:
        """Note that the grammar cannot go on: the slot is to end with this error."""
        self.failure, self.is_open = error, False

    def end(self) -> None:
        """Note that the sequence has left its slot."""
        self.ended = True
