"""RowConstraint: the engine's record of one sequence with a grammar. It has the sequence's mask slot and its output,
and gives the masks of its rows to the device's thread."""

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
    """The part of a MatcherClient that the device's thread calls. There is one for each process of the matcher."""

    def mask_at(self, constraint: RowConstraint, position: int) -> TokenMask | None:
        """See RowConstraint."""

    def add_tokens(self, sampled: Many[tuple[RowConstraint, Many[int]]]) -> None:
        """Append the tokens that sequences have sampled and keep to their outputs, and send them to the process. Called
        once per step."""

    def count_forced_tokens(self, count: int) -> None:
        """Count forced tokens that are not sent, since their sequence ends with them."""


class RowConstraint:
    """`mask_at` and `finish` belong to the device's thread. MatcherClient alone calls the other methods: `append` on
    the device's thread, while it holds its lock, and the others on the model thread."""

    def __init__(self, sequence: Sequence, grammar: str, generation: int, mask_source: MaskSource) -> None:
        self.grammar = grammar
        self.generation = generation
        """Identifies the sequence at its process: 1 for the first one, then 2, and so on."""
        self.first_position = len(sequence.prompt_ids)
        self.output: list[int] = sequence.output_ids.tolist()
        """All tokens that the sequence has sampled. A new process replays them."""
        self._grammar_bytes = len(grammar.encode())
        self.mask_slot = NO_MASK_SLOT
        self.is_open = False
        """Whether the current process has opened the sequence, and so has written a first mask. False again while it is
        opened anew, and once the sequence has failed."""
        self.is_held = False
        """Whether a step found its mask missing, and the process has not yet said that it is there."""
        self.failure: QuireError | None = None
        self.ended = False
        self._is_finished = False
        self.mask_source = mask_source
        """The client of the process that applies its grammar."""

    @property
    def is_ready(self) -> bool:
        """Whether a step should include its row: as far as the engine knows, the next mask is there."""
        return self.is_open and not self.is_held

    @property
    def next_position(self) -> int:
        """The position of the next token."""
        return self.first_position + len(self.output)

    def mask_at(self, position: int) -> TokenMask | None:
        """Return the tokens that may be sampled at this position; None: the mask is missing, or the sequence has
        finished or ended."""
        return None if self._is_finished else self.mask_source.mask_at(self, position)

    def finish(self, tokens: Many[int] = ()) -> None:
        """Note that the device has sampled the last `tokens` of the sequence. Steps in flight may still have a row of
        the sequence. These steps find no mask, even if the ring has lookahead masks."""
        self._is_finished = True
        if len(tokens) > 1:
            self.mask_source.count_forced_tokens(len(tokens) - 1)

    def append(self, tokens: Many[int]) -> int:
        """Append sampled tokens to the output; returns the position of the first."""
        position = self.next_position
        self.output.extend(tokens)
        return position

    @property
    def open_bytes(self) -> int:
        """The size of its OPEN frame, which has the grammar and the output."""
        return open_frame_bytes(len(self.output), self._grammar_bytes)

    def replay_key(self) -> bytes:
        """Return a digest of the grammar and the output, which determine the matcher's work. Sequences with the same
        key crash a process all, or none does."""
        found = xxhash.xxh3_128(self.grammar.encode())
        found.update(b"\0" + np.array(self.output, np.int32).tobytes())
        return found.digest()

    def assign_mask_slot(self, mask_slot: int) -> None:
        """Set its mask slot, which it keeps until it ends."""
        self.mask_slot = mask_slot

    def move_to(self, mask_source: MaskSource, generation: int) -> None:
        """Have another process apply the grammar of a sequence that still waits for a mask slot."""
        self.mask_source, self.generation = mask_source, generation

    def set_open(self, is_open: bool) -> None:
        """Set whether the process has opened the sequence. False: the process is lost, or is to open it again. Either
        way the sequence is not held any more. A sequence that has failed stays closed, since the process may still
        answer an earlier OPEN."""
        self.is_open, self.is_held = is_open and self.failure is None, False

    def set_held(self, is_held: bool) -> None:
        """Set whether the sequence waits for a mask that a step found missing."""
        self.is_held = is_held

    def fail(self, error: QuireError) -> None:
        """Set the error with which the sequence is to end. From now on it is not ready."""
        self.failure, self.is_open = error, False

    def end(self) -> None:
        """Record that the sequence has left its slot."""
        self.ended = True
