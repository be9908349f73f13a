"""LogitsStates: the logits processor states of sequences, on the device, by slot.

A state is uploaded when its sequence samples first. From then on only the device changes it, and the host never reads
it back. The state of an ended sequence stays until its memory is needed, so that a step launched before the end was
known still finds it. A later upload on the same stream then takes the memory, after that step. All states together take
no more memory than was reserved beside the KV pages. A request for which no memory is left fails by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_common.errors import Overloaded
from quire_worker.cuda.memory import LOGITS_STATE_BYTES
from quire_worker.sampling.state_layout import (
    AT,
    forbidding_state,
    most_ids,
    packed_state,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quire_common.errors import QuireError
    from quire_worker.arrays import Int32
    from quire_worker.sampling.logits_state import LogitsState
    from quire_worker.step import StepBatch

# New tokens that a state has room for at first. Many answers end before, and a state grows when they do not.
ROOM = 4096
_WORD = 4


@dataclass(slots=True)
class _DeviceState:
    """The device's copy of a state. `capacity` is the number of ids that it has room for, and `most` the number that it
    may need. `left` is how many more tokens fit, if each is new to the sequence; None: it never needs more room."""

    controls: LogitsState
    words: Tensor
    ids_at: int
    capacity: int
    most: int
    left: int | None


class LogitsStates:
    """Belongs to the model thread. Uploads go to the current stream. `room`: see ROOM."""

    def __init__(
        self, device: torch.device, vocab_size: int, *, most_bytes: int = LOGITS_STATE_BYTES, room: int = ROOM
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._most_bytes = most_bytes
        self._room = room
        self._held: dict[int, _DeviceState] = {}
        self._num_bytes = 0
        self._forbidding: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the device that states take."""
        return self._num_bytes

    def addresses(self, batch: StepBatch) -> dict[int, int]:
        """Return, by sequence, the address of its state on the device, for sequences whose logits the device changes.
        States are made or enlarged as needed; each call counts one more token for a sequence that feeds one. A sequence
        for which there is no room gets a state that forbids every token, and its controls have the reason
        (`failure`)."""
        found = {}
        for sequence, controls in batch.controls.items():
            if controls.changes_logits and not controls.runs_python:
                fed = bool(batch.fed[sequence])
                state = self._state(int(batch.slot[sequence]), controls, fed=fed)
                if state is None:
                    controls.fail(_no_room())
                    state = self._forbid()
                found[sequence] = state.data_ptr()
        return found

    def clear(self) -> None:
        """Drop all states; all sequences are gone, and no step is in flight."""
        self._held.clear()
        self._num_bytes = 0

    def _state(self, slot: int, controls: LogitsState, *, fed: bool) -> Tensor | None:
        """The slot's state on the device, made if the slot has no state of this sequence and enlarged if a token that
        is `fed` may not fit; None if there is no room."""
        held = self._held.get(slot)
        if held is None or held.controls is not controls:
            if held is not None:
                self._drop(slot)
            held = self._make(slot, controls)
        if held is not None and fed and held.left is not None:
            held.left -= 1
            if held.left < 0:
                held = self._grow(held)
        return None if held is None else held.words

    def _make(self, slot: int, controls: LogitsState) -> _DeviceState | None:
        """Upload the state of a sequence that has begun to sample, and keep it for its slot; None if there is no
        room."""
        words = packed_state(controls.sequence, self._vocab_size, self._room)
        if not self._make_room(words.nbytes):
            return None
        known, capacity = int(words[AT.known]), int(words[AT.capacity])
        most = most_ids(controls.sequence, known, self._vocab_size)
        left = capacity - known if words[AT.counting] and capacity < most else None
        held = self._held[slot] = _DeviceState(
            controls, self._upload(words), int(words[AT.ids_at]), capacity, most, left
        )
        self._num_bytes += words.nbytes
        return held

    def _grow(self, held: _DeviceState) -> _DeviceState | None:
        """Move a state, with the device's changes, to memory with room for about twice as many ids, but no more than it
        may need. Returns None if there is no room. The ids and their counts are at the end of a state."""
        begin, before = held.ids_at, held.capacity
        after = min(held.most, 2 * before + self._room)
        added = 2 * (after - before)
        if not self._make_room(added * _WORD):
            return None
        words = torch.zeros(len(held.words) + added, dtype=torch.int32, device=self._device)
        words[: begin + before] = held.words[: begin + before]
        words[begin + after : begin + after + before] = held.words[begin + before :]
        words[AT.capacity : AT.capacity + 1].fill_(after)
        held.words, held.capacity = words, after
        held.left = after - before - 1 if after < held.most else None
        self._num_bytes += added * _WORD
        return held

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be taken within the limit of all states. If they do not fit, drop the states
        of ended sequences first."""
        if self._num_bytes + num_bytes > self._most_bytes:
            for slot in [slot for slot, held in self._held.items() if held.controls.ended]:
                self._drop(slot)
        return self._num_bytes + num_bytes <= self._most_bytes

    def _drop(self, slot: int) -> None:
        self._num_bytes -= self._held.pop(slot).words.nbytes

    def _forbid(self) -> Tensor:
        """The shared state that forbids every token; it is uploaded at its first use."""
        if self._forbidding is None:
            self._forbidding = self._upload(forbidding_state(self._vocab_size))
        return self._forbidding

    def _upload(self, words: Int32) -> Tensor:
        """Copy to the device, without waiting for it on a GPU."""
        state = torch.from_numpy(np.ascontiguousarray(words))
        return state.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else state


def _no_room() -> QuireError:
    """Return the Overloaded error for a request for whose logits processor state the GPU has no room."""
    return Overloaded(
        "TOO_MANY_CONTROLS",
        "The GPU has no room left for what the running requests ask of their logits.",
        "Try again later, or ask for fewer biases, allowed tokens and bad words.",
    )
