"""Stage 1: every way of the device's table of products, at the very shape that it was measured for.

Each number of rows that a way is taken for is computed as in a worker's step: in a graph, overlapping with the kernel
that makes its x and with one that reads its result, the weight in no cache. What was there before, and all that lies
beside, is NaN. The reference is float32, of the same bf16 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu_checks.record import Recorder
from quire_worker.cuda.graph_recorder import GraphRecorder
from quire_worker.ops.triton.kernels.embedding import embedding_kernel
from quire_worker.ops.triton.launch import options
from quire_worker.ops.triton.product_tables import read_table, table_of
from quire_worker.ops.triton.products import Products, Shape, Way
from quire_worker.ops.weight import DenseWeight

_TABLE = Path(__file__).resolve().parents[2] / "services/worker/quire_worker/ops/triton/product_tables/h200.json"
# A part of a result may be off by so much of itself, as its type rounds, and by so much of the usual result, as sums
# of thousands do.
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
_SUMMING = {torch.bfloat16: 2.0**-10, torch.float32: 2.0**-17}
_COLD_BYTES = 256 << 20
_BESIDE = 3
_PART = 16_384
_REPLAYS = 3
_BLOCK = 1024


def run(recorder: Recorder, *, tiny: bool) -> None:
    """The table of the GPU; that of the H200 where nobody has measured the GPU; a few tiny shapes without one."""
    on_gpu = torch.cuda.is_available()
    table = tiny_table()
    if on_gpu:
        own = table_of(torch.cuda.get_device_name())
        if not own:
            recorder.skip("the GPU's own table", "nobody has measured it: its products are cuBLAS's")
        table = own or read_table(_TABLE)
    shapes = sorted({shape[1:] for shape in table})
    bench = Bench(table, torch.device("cuda" if on_gpu else "cpu"))
    with torch.inference_mode():
        for outputs, inputs in shapes[:2] if tiny and on_gpu else shapes:
            title = f"products {outputs} x {inputs}"
            with recorder.attempt(title):
                found = bench.check(outputs, inputs)
                recorder.check(
                    title,
                    not found.failed,
                    ways=found.ways,
                    row_counts=found.row_counts,
                    worst=found.worst,
                    failed="; ".join(found.failed),
                )


def tiny_table() -> dict[Shape, Way]:
    """The first way of each kind that a real table has, for shapes that its blocks do not divide."""
    kinds: dict[tuple[object, ...], tuple[int, Way]] = {}
    for (rows, _, _), way in read_table(_TABLE).items():
        kinds.setdefault((type(way), rows > 1, getattr(way, "shares", 1) > 1), (rows, way))
    return {(rows, way.block_n + 5, 2 * way.block_k * getattr(way, "shares", 1)): way for rows, way in kinds.values()}


@dataclass
class Found:
    """Of one weight's shape. `worst` as a part of what is allowed."""

    ways: int = 0
    row_counts: int = 0
    worst: float = 0.0
    failed: list[str] = field(default_factory=list)


class Bench:
    """Weights of a table's shapes on a device, one at a time."""

    def __init__(self, table: Mapping[Shape, Way], device: torch.device) -> None:
        self._table = table
        self._products = Products(table)
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        self._cold = torch.empty(_COLD_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def check(self, outputs: int, inputs: int) -> Found:
        """All ways of a weight's shape, each with all numbers of rows that it is taken for."""
        found, least = Found(), 1
        known = sorted(rows for rows, *shape in self._table if shape == [outputs, inputs])
        generator = torch.Generator(self._device).manual_seed(outputs + inputs)

        def random(rows: int, scale: float) -> Tensor:
            return torch.randn(rows, inputs, generator=generator, device=self._device) * scale

        held = torch.full((outputs + _BESIDE, inputs), torch.nan, dtype=self._dtype, device=self._device)
        held[:outputs] = random(outputs, inputs**-0.5)
        weight, source = DenseWeight(held[:outputs]), random(known[-1], 1.0).to(self._dtype)
        # Rows of float32 weights at a time: the largest take 2 GiB.
        parts = [source.float() @ part.float().T for part in torch.split(weight.data, _PART)]
        wanted = torch.cat(parts, dim=1)
        for most in known:
            way = self._table[most, outputs, inputs]
            found.ways += 1
            for rows in range(least, most + 1):
                found.row_counts += 1
                if self._products.way(rows, outputs, inputs) != way:
                    found.failed.append(f"{rows} rows do not take {way}")
                off = self._error(weight, source, wanted, rows)
                found.worst = max(found.worst, off)
                if not off <= 1.0:
                    found.failed.append(f"{rows} rows by {way}: {off:.3g} of what is allowed")
            least = most + 1
        return found

    def _error(self, weight: DenseWeight, source: Tensor, wanted: Tensor, rows: int) -> float:
        """Of a product of so many rows, as a part of what is allowed; infinite where something beside was written."""
        outputs, inputs = weight.data.shape
        x, y, read = (
            torch.empty((rows + _BESIDE, width), dtype=self._dtype, device=self._device)
            for width in (inputs, outputs, outputs)
        )
        token = torch.arange(rows, dtype=torch.int32, device=self._device)

        def chain() -> None:
            for each in (x, y, read):
                each.fill_(torch.nan)
            self._cold.zero_()
            self._copy(token, source, x)
            self._products.multiply(x[:rows], weight, pdl=True, out=y[:rows])
            self._copy(token, y, read)

        self._run(chain)
        allowed = _ROUNDING[self._dtype] * wanted[:rows].abs() + _SUMMING[self._dtype] * wanted[:rows].std()
        worst = torch.stack([((each[:rows].float() - wanted[:rows]).abs() / allowed).max() for each in (y, read)]).max()
        beside = torch.stack([each[rows:].isnan().all() for each in (x, y, read)]).all()
        return float(worst) if bool(beside) and bool(worst.isfinite()) else float("inf")

    def _copy(self, token: Tensor, table: Tensor, out: Tensor) -> None:
        """Rows of a table, exactly, by a kernel that overlaps with its neighbours."""
        width = table.shape[1]
        grid = (len(token), -(-width // _BLOCK))
        embedding_kernel[grid](token, table, out, width, 1.0, BLOCK=_BLOCK, **options(pdl=True))

    def _run(self, chain: Callable[[], None]) -> None:
        """Compile what is not compiled, then as a graph: by hand a launch takes longer than a kernel, and none begins
        before the last has ended."""
        chain()
        if self._stream is None:
            return
        # One for each graph: the memory pool of a graph that is gone takes no other.
        recorder = GraphRecorder()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            recorder.begin()
            chain()
            graph = recorder.end()
            for _ in range(_REPLAYS):
                graph.replay()
        self._stream.synchronize()
