"""Rows with grammars: their masks in a ring as the matcher leaves them, and columns of a step that draws by them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.ops.triton.kv_splits import split_keys
from quire_worker.ops.triton.masks import RowMasks
from quire_worker.ops.triton.sampling import DeviceSamplingColumns, sample_rows
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.token_mask import TokenMask
from tests.fakes.worker.token_masks import mask_of
from tests.kernels.sampling.sampling_rig import DEVICE, on_device

EOS = (1, 2)
MASK_SLOTS, ENTRIES_PER_SLOT, SLOTS = 16, 2, 16
GENERATION = 7
LAST_TOKEN = 55
"""The results that every row of the step has computed."""


def make_mask(vocab: int, *tokens: int) -> TokenMask:
    """The mask of these tokens, as the matcher makes it."""
    return mask_of(vocab, EOS, tokens)


class MaskedRows:
    """One row for each mask slot, -1 being a row without a grammar; a row's slot is its index. All decode, each at a
    position of its own, which the device knows from the step before."""

    def __init__(self, vocab: int, mask_slots: list[int], position: list[int] | None = None) -> None:
        self.ring = MaskRing.create(MASK_SLOTS, ENTRIES_PER_SLOT, vocab)
        self.masks = DeviceMasks(self.ring, DEVICE, SLOTS, len(mask_slots))
        self.mask_slots = mask_slots
        self.position = np.array(position or [40 + row for row in range(len(mask_slots))], np.int32)
        self.last_token = torch.full((SLOTS,), LAST_TOKEN, dtype=torch.int32, device=DEVICE)
        self.min_len = [0] * len(mask_slots)
        self.bound = [1000] * len(mask_slots)
        self.stop_id = [[-1, -1] for _ in mask_slots]
        self.blocked = [0] * len(mask_slots)
        self.views: dict[str, Tensor] = {}
        self._set_known()

    def put(self, row: int, mask: TokenMask, *, late: int = 0, generation: int = GENERATION) -> None:
        """Write the mask of the token that a row samples next, or of the one `late` positions before it."""
        self.ring.put(self.mask_slots[row], generation, int(self.position[row]) + 1 - late, mask)

    def fetch(self, ahead: int = 0) -> RowMasks:
        """Begin a step that the host has packed for positions `ahead` of the right ones, and read its masks."""
        rows = len(self.mask_slots)
        packed = self.position + np.where(np.array(self.mask_slots) == -1, 0, ahead)
        columns = {
            "mask_slot": self.mask_slots,
            "generation": [GENERATION] * rows,
            "bound": self.bound,
            "min_len": self.min_len,
            "blocked": self.blocked,
            "slot": range(rows),
            "first_row": range(rows),
            "last_row": range(rows),
            "fed": [1] * rows,
            "position": packed,
            "row_position": packed,
            "sample_position": packed + 1,
            "last": packed + 1 >= np.array(self.bound),
        }
        self.views = {name: _ints(values) for name, values in columns.items()}
        self.splits = _ints(split_keys(packed + 1, 8, 2 * rows + 8))
        masks = self.masks.place_rows(self.views, self.splits)
        self.masks.fetch(masks, self.views, _ints(self.stop_id))
        self.masks.await_fetch()
        return masks

    def draw(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        masks: RowMasks,
        *,
        filtered: bool = True,
        changed: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Draw the step's tokens; the positions become those of what is fed next."""
        rows = len(self.mask_slots)
        token, finish = (torch.full((rows,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
        fed = self.last_token[:rows].clone()
        sample_rows(
            logits.to(DEVICE), self.columns(columns), self.last_token, token, finish,
            filtered=filtered, pdl=False, changed=changed, masks=(masks, fed),
        )  # fmt: skip  # passed on as they are
        self.position = self.known.copy()
        return token.tolist(), finish.tolist()

    def columns(self, columns: SamplingColumns) -> DeviceSamplingColumns:
        """The columns of the step that was begun."""
        found = on_device(columns, stop_id=self.stop_id)
        found.position, found.blocked, found.last = (
            self.views[each] for each in ("sample_position", "blocked", "last")
        )
        return found

    @property
    def known(self) -> np.ndarray:
        """The positions of the rows' last tokens, as the device has them."""
        return self.masks._known[: len(self.mask_slots)].cpu().numpy()

    @property
    def held(self) -> list[int]:
        """Whether each row was held, as the device has it."""
        return self.masks._held[: len(self.mask_slots)].tolist()

    def set_position(self, row: int, position: int) -> None:
        """Put a row's last token elsewhere."""
        self.position[row] = position
        self._set_known()

    def _set_known(self) -> None:
        self.masks._known[: len(self.mask_slots)] = torch.from_numpy(self.position).to(DEVICE)


def _ints(values: object) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.array(list(values), np.int64).astype(np.int32))).to(DEVICE)  # type: ignore[call-overload]  # any column
