"""The micro-kernel of a GEMM (Van Zee and van de Geijn, "BLIS", 2015): it multiplies a few rows with a few tiles of
weights, and keeps all sums in registers. It knows nothing of layers or of the formats of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from llvmlite import ir
from numba.core import types

from quire_worker.arrays import Float32
from quire_worker.ops.cpu.job import untyped_intrinsic
from quire_worker.ops.cpu.simd import LANES, LLVM_VECTOR, emit_fma, emit_load, emit_load_broadcast, emit_store

_INT64: Final = ir.IntType(64)
Microkernel = Callable[[Float32, int, int, Float32, int, int, Float32, int], None]


@cache
def make_microkernel(rows: int, tiles: int, run_inputs: int, run_stride: int) -> Microkernel:
    """Make a micro-kernel: (x, x_at, row_stride, weights, weights_at, num_runs, sums, sums_at).

    The micro-kernel adds the products of `num_runs` runs of inputs, at least one, to the sums. A run is `run_inputs`
    inputs of each of the `rows` rows, which are `row_stride` apart in x. The next run begins `run_stride` inputs later.
    weights: [num_runs, run_inputs, tiles, LANES], without gaps. sums: [rows, tiles, LANES], read and written. Each sum
    adds its products one by one, in the order of the inputs, whatever `rows` and `tiles` are.
    """

    def define(_context: Any, x: Any, x_at: Any, row_stride: Any, w: Any, w_at: Any, n: Any, s: Any, s_at: Any) -> Any:
        """Give numba the type of the intrinsic and the function that emits its code."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            """Emit the loop over the runs, unrolled over inputs, rows and tiles, with one fused multiply-add for each
            weight and row. The sums are loaded before the loop and stored after it."""

            def address(argument: int) -> Any:
                field = context.data_model_manager[signature.args[argument]].get_field_position("data")
                return builder.gep(builder.extract_value(values[argument], field), [integer(argument + 1)])

            def integer(argument: int) -> Any:
                return context.cast(builder, values[argument], signature.args[argument], types.intp)

            data, row_distance, weights, num_runs, sums = address(0), integer(2), address(3), integer(5), address(6)
            first = [builder.gep(data, [builder.mul(row_distance, _INT64(row))]) for row in range(rows)]
            sum_indices = [(row, tile) for row in range(rows) for tile in range(tiles)]
            entry_block = builder.block
            initial_sums = [emit_load(builder, sums, _INT64((row * tiles + tile) * LANES)) for row, tile in sum_indices]
            loop, exit_block = builder.append_basic_block("loop"), builder.append_basic_block("after")
            builder.branch(loop)
            builder.position_at_end(loop)
            run = builder.phi(_INT64)
            accumulators = [builder.phi(LLVM_VECTOR) for _ in sum_indices]
            run.add_incoming(_INT64(0), entry_block)
            for phi, value in zip(accumulators, initial_sums, strict=True):
                phi.add_incoming(value, entry_block)
            run_x_at, run_weights_at = (
                builder.mul(run, _INT64(size)) for size in (run_stride, run_inputs * tiles * LANES)
            )
            updated = list(accumulators)
            for k in range(run_inputs):
                weight_at = [builder.add(run_weights_at, _INT64((k * tiles + tile) * LANES)) for tile in range(tiles)]
                weight = [emit_load(builder, weights, at) for at in weight_at]
                for row in range(rows):
                    value = emit_load_broadcast(builder, first[row], builder.add(run_x_at, _INT64(k)))
                    for tile in range(tiles):
                        index = row * tiles + tile
                        updated[index] = emit_fma(builder, value, weight[tile], updated[index])
            next_run = builder.add(run, _INT64(1))
            run.add_incoming(next_run, loop)
            for phi, value in zip(accumulators, updated, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", next_run, num_runs), loop, exit_block)
            builder.position_at_end(exit_block)
            for index, value in enumerate(updated):
                emit_store(builder, sums, _INT64(index * LANES), value)
            return context.get_dummy_value()

        return types.void(x, x_at, row_stride, w, w_at, n, s, s_at), generate

    microkernel: Microkernel = untyped_intrinsic(define)
    return microkernel
