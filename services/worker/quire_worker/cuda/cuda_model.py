"""CudaModel: a decoder and its pages on a CUDA device, and the devices (in the engine's sense) that run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_worker.cuda.cuda_device import CudaDevice
from quire_worker.cuda.graphs.step_graph_cache import StepGraphCache
from quire_worker.cuda.kernel_compiler import compile_steps
from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.cuda.memory import STEP_FIX, naming_out_of_memory, pool_bytes, reserve_memory
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import STOP_IDS, StepLayout, Tiling
from quire_worker.cuda.step_size import MOST_CHUNKS, StepSize, kernel_sizes
from quire_worker.engine.spec import EngineSpec
from quire_worker.model.step_decoder import StepDecoder
from quire_worker.ops.triton.attention_plan import TritonPlan
from quire_worker.ops.triton.fresh_attention import LEAST_TOKENS, PIECE, FreshPlans, padded_length

# Graphs that are there before the first request: a second's worth where the kernels are compiled.
_AT_START = 32


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A decoder and its pages on a GPU. `pages` has the layout of Ops.plan; `attention` names the attention backend
    (see ops.backends)."""

    decoder: StepDecoder[TritonPlan]
    pages: Tensor
    attention: str = "cudnn"

    @property
    def leaves_prompts(self) -> bool:
        """Whether long prompts that begin in a step are computed by torch's attention (cuDNN). This needs the backend
        cudnn, bfloat16 pages, heads and attention that it supports, a decoder that can be cut at attention, and no
        batch invariance."""
        decoder = self.decoder
        suits = FreshPlans.suit(decoder.head_shape, decoder.spec.sees_all) and not decoder.ops.batch_invariant
        # With fp8 pages a prompt would be computed from exact keys when cold and from rounded ones when warm.
        return suits and decoder.can_be_cut and self.pages.dtype == torch.bfloat16 and self.attention == "cudnn"

    def make_device(self, spec: EngineSpec, max_tokens: int, *, eager: bool = False) -> CudaDevice:
        """Make a device for an engine of these sizes: compile the kernels and, unless `eager` or the decoder cannot be
        captured, capture the first graphs. `max_tokens`: most prefill rows of a step. Raises ConfigError if the graphs
        do not fit into memory, or the matcher's ring cannot be mapped."""
        shape, fresh = self.decoder.head_shape, self.leaves_prompts
        tiling = Tiling.of(shape, self.pages.device, even=self.decoder.ops.batch_invariant)
        # An eager step may hold more sequences than a captured one: as many as there are tokens.
        chunks = max(MOST_CHUNKS, min(max_tokens, spec.num_slots))
        rows = padded_length(max_tokens) + PIECE
        masked = spec.masks is not None
        largest = StepSize(spec.max_num_seqs, rows, chunks, filtered=True, controlled=True, masked=masked)
        words = StepLayout.of(largest, tiling, max(STOP_IDS, spec.max_stop_ids)).words(spec.table_width)
        masks = None
        if spec.masks is not None:
            masks = DeviceMasks(spec.masks, self.pages.device, spec.num_slots, largest.sequences)
        body = StepBody(self.decoder, self.pages, words, spec.num_slots, largest.sequences, masks)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        vocab_size = self.decoder.spec.vocab_size
        reserve = pool_bytes(self.decoder.spec, largest.total_rows, largest.sequences, vocab_size)
        with torch.cuda.stream(stream):
            reserve_memory(reserve)
            sizes = kernel_sizes(spec.max_num_seqs, max_tokens, _AT_START, masked=masked)
            compile_steps(body, tiling, sizes, fresh=fresh and max_tokens >= LEAST_TOKENS)
        graphs = None
        if not eager and self.decoder.can_be_captured:
            graphs = StepGraphCache(body, tiling, stream, spec.max_num_seqs, max_tokens, reserve, fresh=fresh)
            with naming_out_of_memory("graphs of steps", STEP_FIX, "gpu_memory_utilization"):
                graphs.capture(_AT_START)
        plans = FreshPlans(shape, self.pages.device, max_tokens) if fresh else None
        torch.cuda.synchronize()
        return CudaDevice(body, tiling, graphs, stream, plans, spec.logits_processors, spec.step_timeout_s)
