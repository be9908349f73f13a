"""A decode step of a real shape as one CUDA graph, GPU time only: batch sizes, with and without PDL.

`python -m bench.gpu_step [--table FILE]` on the GPU. Random weights, argmax, context 256; ways of products from the
checked-in table of the device, or from FILE.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from bench.gpu_figures import ITL
from bench.gpu_shapes import SHAPES
from bench.gpu_timing import chain_us
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.attention_plan import TritonPlan, plan_step
from quire_worker.ops.triton.product_tables import products_for, read_table
from quire_worker.ops.triton.products import Products
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.weights.parameter_store import ParameterStore

PAGE = 64
_REPLAYS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SHAPES))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128, 256])
    args = parser.parse_args()
    device = torch.device("cuda")
    products = Products(read_table(args.table)) if args.table else products_for(torch.cuda.get_device_name(device))
    for name in args.models:
        spec = SHAPES[name]
        with torch.device(device), torch.inference_mode():
            store = ParameterStore(parameter_specs(spec), torch.bfloat16)
            for packed in store._packed.values():
                packed.normal_(0.0, 0.02)
            ops_shape = HeadShape.of(spec)
            ops = TritonOps(ops_shape, device, products)
            decoder = Decoder(spec, store, ops, args.context + 64)
            for batch in args.batches:
                per = -(-args.context // PAGE)
                pages = torch.empty(
                    batch * per + 1, spec.kv_heads, spec.layers, 2, PAGE, spec.head_dim, dtype=torch.bfloat16
                )
                pages.normal_()
                order = torch.randperm(batch * per, dtype=torch.int32) + 1
                position = np.full(batch, args.context - 1, np.int32)
                table = order.view(batch, per).cpu().numpy()
                plan = plan_step(device, batch, position, np.ones(batch, np.int32), table, ops_shape)
                token = torch.randint(0, spec.vocab_size, (batch,), dtype=torch.int64)
                took: dict[bool, float] = {}
                for pdl in (False, True):
                    ops.pdl = pdl
                    took[pdl] = time_step(decoder, token, pages, plan)
                kv = 2 * spec.layers * spec.kv_size * 2 * args.context * batch
                weights = store.num_bytes - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size * 2)
                floor = (kv + weights) / 4.3e9
                print(
                    f"{name} batch {batch:4} ms: plain {took[False]:6.3f}, overlapped {took[True]:6.3f}, "
                    f"floor {floor:5.2f}; whole engines {ITL[name][batch].spelled() if batch in ITL[name] else '-'}",
                    flush=True,
                )
                del pages
            del store, decoder
            torch.cuda.empty_cache()


def time_step(decoder: Decoder[TritonPlan], token: torch.Tensor, pages: torch.Tensor, plan: TritonPlan) -> float:
    """Milliseconds of one replay; the median."""

    def step() -> torch.Tensor:
        return decoder.logits(decoder.forward(token, pages, plan)).argmax(dim=-1)

    return chain_us(lambda _: step(), 1, replays=_REPLAYS) / 1000


if __name__ == "__main__":
    main()
