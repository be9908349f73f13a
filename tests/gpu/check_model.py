"""CheckModel: one small model twice: in float32 by the torch reference, and on the device that is checked.

Both have the same weights, as bf16 holds them, and of a scale that makes logits differ. Without a GPU the device's half
runs in float32 under Triton's interpreter.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import KvGroup, ModelInfo, PageGeometry
from quire_worker.arrays import Float32
from quire_worker.cuda.cuda_model import CudaModel
from quire_worker.engine.ports import Device
from quire_worker.engine.spec import EngineSpec
from quire_worker.kv.page_geometry import LAYOUT, kv_groups
from quire_worker.kv.page_pool import PagePool, pages_to_zero
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.replica import ServedModel, from_host
from quire_worker.runner import ModelRunner
from quire_worker.step import StepBatch
from quire_worker.weights.loader import load_dummy
from quire_worker.weights.parameter_store import ParameterStore
from tests.model.folders import read_source

# A chunk of the largest step, and a past.
_CONTEXT = 20_480
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_TINY = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16}
_SMALL = {"vocab_size": 4099, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_SCALE = 8.0


class CheckModel:
    """`runner` is the reference, `decoder` and `pages` the device's."""

    def __init__(self, folder: Path, num_pages: int) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.page_size = 64 if self.on_gpu else 16
        self.num_pages = num_pages
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(_CONFIG | (_SMALL if self.on_gpu else _TINY)))
        spec = self.spec = read_source(folder).spec
        parameters, dtype = parameter_specs(spec), torch.bfloat16 if self.on_gpu else torch.float32
        plain, there = ParameterStore(parameters), ParameterStore(parameters, dtype, self.device)
        load_dummy(parameters, plain, 1, lambda *_: None)
        for each in parameters:
            if "norm" not in each.role:
                plain.destination(each).mul_(_SCALE)
            there.destination(each).copy_(plain.destination(each))
        shape = HeadShape.of(spec)
        (group,) = kv_groups(spec, self.page_size, "float32")
        pool = PagePool(group, self.page_size, num_pages)
        with torch.inference_mode():
            ops = TorchOps(shape, self.page_size)
            self.runner = ModelRunner(Decoder(spec, plain, ops, spec.max_positions), pool)
            triton = TritonOps(shape, self.device, GemmConfigs({}))
            triton.pdl = self.on_gpu and torch.cuda.get_device_capability()[0] >= 9
            self.decoder = Decoder(spec, there, triton, spec.max_positions)
        self.pages = torch.full_like(pool.tensor, float("nan"), dtype=dtype, device=self.device)

    def engine_spec(self, max_num_seqs: int, masks: MaskRing | None = None) -> EngineSpec:
        """Sizes of an engine for it; `masks`: those of its rows with grammars."""
        sizes = (max_num_seqs, _CONTEXT, self.spec.vocab_size, self.page_size, self.num_pages)
        return EngineSpec(*sizes, (2,), 8, masks=masks)

    def make_device(self, spec: EngineSpec, max_tokens: int, *, eager: bool) -> Device:
        """The device that is checked."""
        if self.on_gpu:
            return CudaModel(self.decoder, self.pages).make_device(spec, max_tokens, eager=eager)
        from tests.gpu.interpreted_device import InterpretedDevice

        return InterpretedDevice(self.decoder, self.pages, spec)

    def served(self, max_tokens: int, *, eager: bool) -> ServedModel:
        """For an engine."""
        group = KvGroup("full", 1, LAYOUT, "bfloat16", len(self.spec.layers), self.spec.kv_heads, self.spec.head_dim)
        pages = PageGeometry(self.page_size, (group,), b"check")
        info = ModelInfo("check", "", 4096, self.spec.vocab_size, (2,), b"", pages, 0, "", ())
        # Nobody moves pages here; those of the reference stand in for what could be moved.
        copier = from_host(self.runner.pool)
        return ServedModel(
            lambda spec, _: self.make_device(spec, max_tokens, eager=eager), copier, info, self.num_pages
        )

    def fill_reference(self, batch: StepBatch) -> None:
        """Random keys and values where the batch's sequences have them, on the reference; behind them zeros, which it
        relies on."""
        used = torch.from_numpy(np.unique(batch.page_table[batch.page_table > 0]).astype(np.int64))
        kept = self._kept(batch)[used]
        self.runner.pool.tensor[used] = torch.where(kept, self._content[used].float(), 0.0)

    def fill_device(self, batch: StepBatch) -> None:
        """The same keys and values on the device, and NaN in all other places."""
        kept = self._kept(batch).to(self.device)
        self.pages.copy_(torch.where(kept, self._content_there, torch.nan))
        self.pages[0] = 0
        if self.on_gpu:
            # Steps run on a stream that does not wait for this one.
            torch.cuda.synchronize()

    def poison(self, pages: list[int]) -> None:
        """NaN in these pages of the device, which no step touches now."""
        if pages:
            self.pages[pages] = float("nan")
        if self.on_gpu:
            torch.cuda.synchronize()

    def _kept(self, batch: StepBatch) -> Tensor:
        """[pages, 1, 1, 1, tokens, 1]: which places belong to a sequence."""
        before = batch.position[:, None] - self.page_size * np.arange(batch.page_table.shape[1])
        tokens = np.zeros(self.num_pages, np.int64)
        tokens[batch.page_table.ravel()] = np.clip(before, 0, self.page_size).ravel()
        tokens[0] = 0
        kept = np.arange(self.page_size) < tokens[:, None]
        return torch.from_numpy(kept)[:, None, None, None, :, None]

    @cached_property
    def _content(self) -> Tensor:
        """What pages hold, in bf16: a page's is the same each time, but it is another sequence's."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.pages.shape, generator=generator).bfloat16()

    @cached_property
    def _content_there(self) -> Tensor:
        return self._content.to(self.device, self.pages.dtype)

    @torch.inference_mode()
    def reference_logits(self, batch: StepBatch) -> Float32:
        """[S, V] of each sequence's last row. All of the batch's tokens are resolved."""
        decoder, pool, size = self.runner.decoder, self.runner.pool, len(batch.token)
        pool.zero_pages(pages_to_zero(batch.position, batch.count, batch.page_table, self.page_size))
        multiple = decoder.ops.row_multiple
        token = np.zeros(-(-size // multiple) * multiple, np.int64)
        token[:size] = batch.token
        plan = decoder.ops.plan(pool.tensor, len(token), batch.position, batch.count, batch.page_table)
        hidden = decoder.forward(torch.from_numpy(token), pool.tensor, plan)
        last = np.zeros(-(-len(batch.count) // multiple) * multiple, np.int64)
        last[: len(batch.count)] = np.cumsum(batch.count) - 1
        found: Float32 = decoder.logits(hidden[torch.from_numpy(last)])[: len(batch.count)].numpy()
        return found
