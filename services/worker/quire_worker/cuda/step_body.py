"""StepBody: the whole of a step on the device, from uploaded columns to tokens, finish codes and the tokens that are
fed back.

Without `edit`, all its launches are asynchronous and the same for all steps of a size, so they can be captured as a
graph; run without a capture, they compute the same. Results of a size lie at fixed places: tokens, then finish codes,
of all its sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_common.errors import Internal
from quire_worker.cuda.host_rows import Changed
from quire_worker.ops.triton.attention_plan import TritonPlan
from quire_worker.ops.triton.controls import ControlColumns, change_logits
from quire_worker.ops.triton.feed import feed_tokens
from quire_worker.ops.triton.fresh_attention import best_backend
from quire_worker.ops.triton.kv_splits import COLUMNS
from quire_worker.ops.triton.masks import RowMasks
from quire_worker.ops.triton.sampling import DeviceSamplingColumns, sample_rows

if TYPE_CHECKING:
    from quire_worker.cuda.masks.device_masks import DeviceMasks
    from quire_worker.cuda.step_layout import StepLayout
    from quire_worker.model.mixers import Attend
    from quire_worker.model.step_decoder import StepDecoder

Edit = Callable[[Tensor, Tensor, Changed, RowMasks | None], Changed]
"""(logits, last_token, what is changed, masks) -> what is changed then; see HostRows."""


class StepBody:
    """One model on one device. `uploaded` is the buffer that layouts describe, and `last_token` [slots] has the sampled
    tokens. `masks` None: no step has rows with grammars."""

    def __init__(
        self,
        decoder: StepDecoder[TritonPlan],
        pages: Tensor,
        words: int,
        slots: int,
        sequences: int,
        masks: DeviceMasks | None = None,
    ) -> None:
        self.decoder = decoder
        self.pages = pages
        self.masks = masks
        device = pages.device
        self.uploaded = torch.zeros(words, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(slots, dtype=torch.int32, device=device)
        self._arrived = torch.zeros((slots, decoder.head_shape.kv_heads), dtype=torch.int32, device=device)
        self.results = torch.zeros(2 * sequences, dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        """Of the last step that was launched, or captured, [sequences, V]: for logprobs, right after it."""
        self.advanced = False
        """Whether the last launch came to where logits processor states change or tokens are fed back: the same step
        cannot be launched again."""

    @torch.inference_mode()
    def launch(
        self,
        layout: StepLayout,
        edit: Edit | None = None,
        *,
        attend: Attend[TritonPlan] | None = None,
        all_rows: bool = False,
    ) -> Tensor | None:
        """Launch all kernels of a step whose columns are uploaded: feed tokens, run the layers, compute the logits of
        each sequence's last row, apply masks and logits processor states, and sample.

        Its tokens and finish codes go to `results`, its logits to `logits`. `advanced` says whether the step got so far
        that it cannot be launched again. With `all_rows`, returns the hidden rows of all tokens. Otherwise, returns
        None, and the last feed-forward block may compute only each sequence's last row. In steps that are not captured,
        `edit` is called before any token is sampled. `attend` replaces attention, as in Decoder.forward.
        """
        size = layout.size
        self.advanced = False
        views = self._views(layout)
        masks = self._place_rows(views) if size.masked else None
        token = feed_tokens(views["token"], views["fed"], views["row_sequence"], views["slot"], self.last_token)
        plan = self._plan(layout, views)
        last_row = views["last_row"].long() if size.chunks else None
        output_rows = None if all_rows or 2 * size.sequences > size.total_rows else last_row
        with best_backend(self.pages) if layout.fresh else contextlib.nullcontext():
            hidden = self.decoder.forward(token, self.pages, plan, attend, output_rows)
        last = hidden if last_row is None or output_rows is not None else hidden.index_select(0, last_row)
        stop_id = views["stop_id"].view(size.sequences, layout.stop_ids)
        if masks is not None and self.masks is not None:
            self.masks.fetch(masks, views, stop_id)  # takes as long as a large part of the head's product
        try:
            self.logits = self.decoder.logits(last)
        finally:
            # Also behind an error: a capture cannot end before it, nor may a step that is launched again begin.
            if masks is not None and self.masks is not None:
                self.masks.await_fetch()
        changed = self._changed(views, stop_id, self.logits, masks) if size.controlled else None
        # Logits processor states, and the host's data about the rows that it edits, are updated before sampling.
        self.advanced = size.controlled or edit is not None
        if edit is not None:
            changed = edit(self.logits, self.last_token, changed, masks)
        sequences = size.sequences
        sample_rows(
            self.logits,
            DeviceSamplingColumns(
                params=views["params"],
                position=views["sample_position"],
                blocked=views["blocked"],
                stop_id=stop_id,
                wanted=views["wanted"],
                last=views["last"],
                slot=views["slot"],
            ),
            self.last_token,
            self.results[:sequences],
            self.results[sequences : 2 * sequences],
            filtered=size.filtered,
            pdl=False,
            changed=changed,
            masks=None if masks is None else (masks, token),
        )
        self.advanced = True
        return hidden if all_rows else None

    def _place_rows(self, views: dict[str, Tensor]) -> RowMasks:
        """Correct the positions of rows with grammars. Returns the data about these rows that sampling needs. Raises
        Internal NO_MASKS if the device has no masks."""
        if self.masks is None:
            raise Internal("NO_MASKS", "A step has rows with grammars, and the device no masks.", "Report it.")
        return self.masks.place_rows(views, views.get("split"))

    def _changed(
        self, views: dict[str, Tensor], stop_id: Tensor, logits: Tensor, masks: RowMasks | None
    ) -> tuple[Tensor, Tensor]:
        """Launch the kernel that changes logits by the rows' logits processor states. Returns the states' addresses by
        row, and the changed logits, from which rows with a state sample."""
        address = views["control"].view(torch.int64)
        columns = ControlColumns(
            address=address,
            first_row=views["first_row"],
            fed=views["fed"],
            slot=views["slot"],
            blocked=views["blocked"],
            stop_id=stop_id,
        )
        return address, change_logits(logits, columns, self.last_token, None if masks is None else masks.allowed)

    def _views(self, layout: StepLayout) -> dict[str, Tensor]:
        return {name: self.uploaded[begin : begin + length] for name, (begin, length) in layout.place.items()}

    def _plan(self, layout: StepLayout, views: dict[str, Tensor]) -> TritonPlan:
        """The step's attention plan, made of views of its uploaded columns."""
        tiled = layout.tiled and "tile_sequence" in views
        return TritonPlan(
            rows=layout.size.total_rows,
            decodes=layout.size.decodes,
            position=views["row_position"],
            sequence=views["row_sequence"],
            page_table=self.uploaded[layout.table_at :],
            table_width=views["table_width"],
            splits=views["split"].view(COLUMNS, -1) if "split" in views else None,
            arrived=self._arrived,
            tile_tokens=layout.tiling.tokens,
            tile_sequence=views["tile_sequence"] if tiled else None,
            tile_token=views["tile_token"] if tiled else None,
            first_row=views["first_row"] if tiled else None,
            first_position=views["position"] if tiled else None,
            count=views["count"] if tiled else None,
            even=layout.tiling.even,
            fresh=layout.fresh,
        )
