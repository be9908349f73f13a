"""ProductChain: one product as it stands in a worker's step, and how far it is from what it should be.

In a graph, overlapping with the kernel that makes its x and with one that reads its result, the weight in no cache.
What was there before, and all that lies beside, is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.gpu.record import Recorder
from quire_worker.cuda.graphs.graph_recorder import GraphRecorder
from quire_worker.ops.triton.kernels.embedding import embedding_kernel
from quire_worker.ops.triton.launch import options

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""A result may be off by so much of itself, as its type rounds."""
_COLD_BYTES = 256 << 20
_BESIDE = 3
_REPLAYS = 3
_BLOCK = 1024


@dataclass
class Found:
    """Of one weight's shape. `worst` as a part of what is allowed."""

    ways: int = 0
    row_counts: int = 0
    worst: float = 0.0
    failed: list[str] = field(default_factory=list)

    def add(self, rows: int, config: object, off: float) -> None:
        """What came of so many rows."""
        self.row_counts += 1
        self.worst = max(self.worst, off)
        if not off <= 1.0:
            self.failed.append(f"{rows} rows by {config}: {off:.3g} of what is allowed")

    def tell(self, recorder: Recorder, title: str) -> None:
        """A check that holds where nothing failed."""
        recorder.check(
            title,
            not self.failed,
            ways=self.ways,
            row_counts=self.row_counts,
            worst=self.worst,
            failed="; ".join(self.failed),
        )


class ProductChain:
    """On one device, in the type that products have there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        self._cold = torch.empty(_COLD_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def operands(self, outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor]:
        """A random weight with NaN behind it, whose products with the random rows beside it are about 1."""
        generator = torch.Generator(self.device).manual_seed(outputs + inputs)
        held = torch.full((outputs + _BESIDE, inputs), torch.nan, dtype=self.dtype, device=self.device)
        held[:outputs] = torch.randn(outputs, inputs, generator=generator, device=self.device) * inputs**-0.5
        return held[:outputs], torch.randn(rows, inputs, generator=generator, device=self.device).to(self.dtype)

    def error(self, gemm: Callable[[Tensor, Tensor], object], source: Tensor, wanted: Tensor, summing: float) -> float:
        """Of `multiply(x, out)`, x being the source, as a part of what is allowed: rounding, and `summing` of the usual
        result; infinite where something beside was written."""
        rows = len(wanted)
        x, y, read = (
            torch.empty((rows + _BESIDE, width), dtype=self.dtype, device=self.device)
            for width in (source.shape[1], wanted.shape[1], wanted.shape[1])
        )
        token = torch.arange(rows, dtype=torch.int32, device=self.device)

        def chain() -> None:
            for each in (x, y, read):
                each.fill_(torch.nan)
            self._cold.zero_()
            _copy(token, source, x)
            gemm(x[:rows], y[:rows])
            _copy(token, y, read)

        self._run(chain)
        allowed = ROUNDING[self.dtype] * wanted.abs() + summing * wanted.std()
        worst = torch.stack([((each[:rows].float() - wanted).abs() / allowed).max() for each in (y, read)]).max()
        beside = torch.stack([each[rows:].isnan().all() for each in (x, y, read)]).all()
        return float(worst) if bool(beside) and bool(worst.isfinite()) else float("inf")

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


def _copy(token: Tensor, table: Tensor, out: Tensor) -> None:
    """Rows of a table, exactly, by a kernel that overlaps with its neighbours."""
    width = table.shape[1]
    grid = (len(token), -(-width // _BLOCK))
    embedding_kernel[grid](token, table, out, width, 1.0, BLOCK=_BLOCK, **options(pdl=True))
