"""The micro-kernel of a matrix product (Van Zee and van de Geijn, "BLIS", 2015): a few rows times a few tiles of
weights, with all sums in registers. It knows nothing of layers or of how weights are stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from quire_worker.arrays import Float32
from quire_worker.ops.cpu.simd import LANES, LLVM_VECTOR, emit_fma, emit_load, emit_spread_from, emit_store

_INT: Final = ir.IntType(64)
Microkernel = Callable[[Float32, int, int, Float32, int, int, Float32, int], None]


@cache
def make_microkernel(rows: int, tiles: int, step: int, stride: int) -> Microkernel:
    """(x, x_at, row_stride, weights, weights_at, steps, sums, sums_at): add the products of `steps` runs of inputs.

    A run is `step` inputs of each of the `rows` rows, which are `row_stride` apart in x; the next run begins `stride`
    inputs later. weights: [steps, step, tiles, LANES], without gaps. sums: [rows, tiles, LANES], read and written. Each
    sum adds its products one by one, in the order of the inputs, whatever `rows` and `tiles` are.
    """

    def define(_context: Any, x: Any, x_at: Any, row_stride: Any, w: Any, w_at: Any, n: Any, s: Any, s_at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def address(number: int) -> Any:
                place = context.data_model_manager[signature.args[number]].get_field_position("data")
                return builder.gep(builder.extract_value(values[number], place), [whole(number + 1)])

            def whole(number: int) -> Any:
                return context.cast(builder, values[number], signature.args[number], types.intp)

            data, row_step, weights, steps, sums = address(0), whole(2), address(3), whole(5), address(6)
            first = [builder.gep(data, [builder.mul(row_step, _INT(row))]) for row in range(rows)]
            places = [(row, tile) for row in range(rows) for tile in range(tiles)]
            before = builder.block
            loaded = [emit_load(builder, sums, _INT((row * tiles + tile) * LANES)) for row, tile in places]
            loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
            builder.branch(loop)
            builder.position_at_end(loop)
            number = builder.phi(_INT)
            held = [builder.phi(LLVM_VECTOR) for _ in places]
            number.add_incoming(_INT(0), before)
            for phi, value in zip(held, loaded, strict=True):
                phi.add_incoming(value, before)
            x_from, w_from = (builder.mul(number, _INT(size)) for size in (stride, step * tiles * LANES))
            added = list(held)
            for k in range(step):
                w_now = [builder.add(w_from, _INT((k * tiles + tile) * LANES)) for tile in range(tiles)]
                weight = [emit_load(builder, weights, at) for at in w_now]
                for row in range(rows):
                    value = emit_spread_from(builder, first[row], builder.add(x_from, _INT(k)))
                    for tile in range(tiles):
                        place = row * tiles + tile
                        added[place] = emit_fma(builder, value, weight[tile], added[place])
            following = builder.add(number, _INT(1))
            number.add_incoming(following, loop)
            for phi, value in zip(held, added, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
            builder.position_at_end(after)
            for place, value in enumerate(added):
                emit_store(builder, sums, _INT(place * LANES), value)
            return context.get_dummy_value()

        return types.void(x, x_at, row_stride, w, w_at, n, s, s_at), generate

    word: Any = intrinsic(define)  # numba's stubs do not type the function that kernels call
    made: Microkernel = word
    return made
