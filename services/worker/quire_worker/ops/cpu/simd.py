"""Intrinsics for compiled kernels: operations on vectors of 16 floats, which the processor executes as written.

The compiler does not vectorise loops whose arrays might overlap, nor sums, because it must keep their order. With these
intrinsics the source fixes the order of every sum. So a row's results have the same bits in every batch.

Lanes are float32. `at` is an index into a flat array, whose elements may be narrower than float32 where an intrinsic
says so. No intrinsic checks bounds. Nothing in this file knows of models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from quire_worker.arrays import Float32, Int8, Int64, UInt8, UInt16

LANES: Final = 16
HAS_AVX512: Final = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]
"""True if kernels are compiled for 32 registers of 16 floats. NUMBA_CPU_FEATURES can turn AVX-512 off."""
Vector = Any
"""[LANES] float32 in a register. A vector exists only within a kernel."""
Scalar = float | np.float32
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Emit = Callable[..., Any]
"""(builder, LLVM values of the arguments) -> LLVM value of the result."""

_FLOAT32 = ir.FloatType()
_INT32 = ir.IntType(32)
LLVM_VECTOR: Final = ir.VectorType(_FLOAT32, LANES)
"""LLVM's type of a `Vector`, for modules that emit code."""
_INT32_VECTOR = ir.VectorType(_INT32, LANES)
_ALIGN: Final = 4
_LOG2_E: Final = 1.44269504088896341
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
_MAGIC_BIAS: Final = 12582912.0
"""1.5 * 2^23. If it is added to a small number, the low bits of the sum are the nearest integer."""
_EXP_COEFFICIENTS: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN_INPUT: Final = -87.0
_EXP_MAX_INPUT: Final = 88.0


def kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile the function at its first call, in memory. It runs without the GIL."""
    return cast("Callable[_P, _T]", numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function))


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Any) -> None:
        super().__init__(manager, vector, LLVM_VECTOR)  # type: ignore[no-untyped-call]  # numba's is not annotated


_NUMBA_VECTOR = _VectorType()
_RESULT_TYPES: Final = {"v": _NUMBA_VECTOR, "f": types.float32, "": types.void}


def _vector_intrinsic(arguments: str, result: str, emit: _Emit) -> Any:
    """Make an intrinsic for numba. Each letter of `arguments` is a kind: v vector, f float, i integer, a flat array.
    `result` is v, f, or empty for no result.

    `emit` (builder, operands) emits the code. It gets the pointer to the first element of an array, float32 for f and
    an index-sized integer for i.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        """Emit the call: convert the arguments by their kinds, pass them to `emit`, and return its value, or numba's
        dummy value if the intrinsic has no result."""
        operands = []
        for kind, argument_type, value in zip(arguments, signature.args, values, strict=True):
            if kind == "a":
                # Directly from the structure: numba's own helper first writes all of it to memory, in each intrinsic.
                field = context.data_model_manager[argument_type].get_field_position("data")
                operands.append(builder.extract_value(value, field))
            elif kind == "v":
                operands.append(value)
            else:
                operands.append(
                    context.cast(builder, value, argument_type, types.float32 if kind == "f" else types.intp)
                )
        emitted = emit(builder, *operands)
        return emitted if result else context.get_dummy_value()

    def define(_context: Any, *argument_types: Any) -> Any:
        return _RESULT_TYPES[result](*argument_types), generate

    parameters = ["context", *(f"argument{number}" for number in range(len(arguments)))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    define.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in parameters])  # type: ignore[attr-defined]  # how numba counts parameters
    return intrinsic(define)


def _vector_constant(value: float, vector_type: Any = LLVM_VECTOR) -> Any:
    return ir.Constant(vector_type, [value] * LANES)


def _call_llvm_intrinsic(builder: Any, name: str, result_type: Any, *arguments: Any) -> Any:
    function_type = ir.FunctionType(result_type, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _vector_pointer(builder: Any, array: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(array, [at]), LLVM_VECTOR.as_pointer())


def emit_load(builder: Any, array: Any, at: Any) -> Any:
    """Emit the load of LANES elements from index `at`; `array` is a pointer to the first element. 16-bit elements are
    the bits of float16 and become float32."""
    if array.type.pointee == ir.IntType(16):
        return _load_float16(builder, array, at)
    return builder.load(_vector_pointer(builder, array, at), align=_ALIGN)


def _widening_load(bits: int, widen: Callable[[Any, Any], Any]) -> _Emit:
    """Return the emitter (builder, array, at) that loads LANES integers of `bits` bits from index `at`. `widen` emits
    their conversion to float32."""
    vector_type = ir.VectorType(ir.IntType(bits), LANES)

    def emit(builder: Any, array: Any, at: Any) -> Any:
        address = builder.bitcast(builder.gep(array, [at]), vector_type.as_pointer())
        return widen(builder, builder.load(address, align=bits // 8))

    return emit


def _widen_low_nibbles(builder: Any, raw: Any) -> Any:
    """Emit bits 0 to 3 of each byte as float32 from 0 to 15."""
    return builder.sitofp(
        builder.and_(builder.zext(raw, _INT32_VECTOR), _vector_constant(15, _INT32_VECTOR)), LLVM_VECTOR
    )


def _widen_high_nibbles(builder: Any, raw: Any) -> Any:
    """Emit bits 4 to 7 of each byte as float32 from 0 to 15."""
    return builder.sitofp(
        builder.lshr(builder.zext(raw, _INT32_VECTOR), _vector_constant(4, _INT32_VECTOR)), LLVM_VECTOR
    )


def _widen_int8(builder: Any, raw: Any) -> Any:
    return builder.sitofp(builder.sext(raw, _INT32_VECTOR), LLVM_VECTOR)


def _widen_bfloat16(builder: Any, raw: Any) -> Any:
    """Emit the float32 of which each 16-bit integer is the upper half."""
    return builder.bitcast(
        builder.shl(builder.zext(raw, _INT32_VECTOR), _vector_constant(16, _INT32_VECTOR)), LLVM_VECTOR
    )


def _widen_float16(builder: Any, raw: Any) -> Any:
    return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), LLVM_VECTOR)


_load_float16 = _widening_load(16, _widen_float16)


def emit_store(builder: Any, array: Any, at: Any, value: Any) -> None:
    """Emit `store`."""
    builder.store(value, _vector_pointer(builder, array, at), align=_ALIGN)


def _emit_broadcast(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(LLVM_VECTOR, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(single, ir.Constant(LLVM_VECTOR, ir.Undefined), _vector_constant(0, _INT32_VECTOR))


def emit_load_broadcast(builder: Any, array: Any, at: Any) -> Any:
    """Emit `load_broadcast`: load one element into all lanes."""
    return _emit_broadcast(builder, builder.load(builder.gep(array, [at]), align=_ALIGN))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit `fma`."""
    return _call_llvm_intrinsic(builder, "llvm.fma.v16f32", LLVM_VECTOR, a, b, c)


def _emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _tree_reduction(combine: Callable[[Any, Any, Any], Any]) -> _Emit:
    """Return the emitter that combines all lanes of a vector into one float by `combine`: always in the same order,
    half with half."""

    def emit(builder: Any, value: Any) -> Any:
        """Emit the reduction in log2(LANES) turns: each combines every lane with the one half as far away as the turn
        before."""
        distance = LANES // 2
        while distance:
            partners = [(lane + distance) % LANES for lane in range(LANES)]
            other = builder.shuffle_vector(
                value, ir.Constant(LLVM_VECTOR, ir.Undefined), ir.Constant(_INT32_VECTOR, partners)
            )
            value = combine(builder, value, other)
            distance //= 2
        return builder.extract_element(value, ir.Constant(_INT32, 0))

    return emit


def _emit_exp(builder: Any, value: Any) -> Any:
    """Emit e^x in each lane: range reduction by multiples of ln 2, a polynomial, and a power of two from exponent bits.
    Below -87 the result is 0, above 88 it is e^88; NaN stays NaN."""
    # Comparisons with NaN are false, so each select keeps the operand that may be NaN.
    upper, lower = _vector_constant(_EXP_MAX_INPUT), _vector_constant(_EXP_MIN_INPUT)
    x = builder.select(builder.fcmp_ordered(">", value, upper), upper, value)
    underflows = builder.fcmp_ordered("<", x, lower)
    x = builder.select(underflows, lower, x)
    shifted = emit_fma(builder, x, _vector_constant(_LOG2_E), _vector_constant(_MAGIC_BIAS))
    integer = builder.fsub(shifted, _vector_constant(_MAGIC_BIAS))
    remainder = emit_fma(
        builder, integer, _vector_constant(-_LN2_LOW), emit_fma(builder, integer, _vector_constant(-_LN2_HIGH), x)
    )
    polynomial = _vector_constant(_EXP_COEFFICIENTS[0])
    for term in _EXP_COEFFICIENTS[1:]:
        polynomial = emit_fma(builder, polynomial, remainder, _vector_constant(term))
    polynomial = emit_fma(
        builder, polynomial, builder.fmul(remainder, remainder), builder.fadd(remainder, _vector_constant(1.0))
    )
    power_of_two = builder.shl(builder.bitcast(shifted, _INT32_VECTOR), _vector_constant(23, _INT32_VECTOR))
    power_of_two = builder.bitcast(builder.add(power_of_two, _vector_constant(127 << 23, _INT32_VECTOR)), LLVM_VECTOR)
    return builder.select(underflows, _vector_constant(0.0), builder.fmul(polynomial, power_of_two))


def _emit_select_range(builder: Any, value: Any, first: Any, low: Any, high: Any, other: Any) -> Any:
    """Emit a select: lane i keeps its value if low <= first + i < high, else it becomes `other`."""
    first, low, high = (_emit_broadcast_int(builder, each) for each in (first, low, high))
    index = builder.add(first, ir.Constant(_INT32_VECTOR, list(range(LANES))))
    inside = builder.and_(builder.icmp_signed(">=", index, low), builder.icmp_signed("<", index, high))
    return builder.select(inside, value, _emit_broadcast(builder, other))


def _emit_broadcast_int(builder: Any, value: Any) -> Any:
    """Emit a vector of LANES int32 that all have this integer's low 32 bits."""
    none = ir.Constant(_INT32_VECTOR, ir.Undefined)
    single = builder.insert_element(none, builder.trunc(value, _INT32), ir.Constant(_INT32, 0))
    return builder.shuffle_vector(single, none, _vector_constant(0, _INT32_VECTOR))


def _emit_transpose(
    builder: Any, source: Any, row_offsets: Any, first: Any, column: Any, target: Any, at: Any, stride: Any
) -> None:
    """Emit `transpose`: load LANES rows of LANES floats from source[row_offsets[first + i] + column]. Transpose them in
    registers, and store the results at target[at], target[at + stride], and so on."""
    index_type = first.type
    rows = []
    for row in range(LANES):
        row_offset = builder.load(builder.gep(row_offsets, [builder.add(first, ir.Constant(index_type, row))]))
        rows.append(emit_load(builder, source, builder.add(row_offset, column)))
    distance = LANES // 2
    while distance:
        # Swap the off-diagonal halves of every square of this size.
        low = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        high = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & distance:
                a, b = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(a, b, ir.Constant(_INT32_VECTOR, low))
                rows[row + distance] = builder.shuffle_vector(a, b, ir.Constant(_INT32_VECTOR, high))
        distance //= 2
    for row in rows:
        emit_store(builder, target, at, row)
        at = builder.add(at, stride)


def _emit_prefetch(builder: Any, array: Any, at: Any) -> None:
    """Emit a prefetch of the element's cache line for reading, into the L2 cache."""
    pointer = builder.bitcast(builder.gep(array, [at]), ir.IntType(8).as_pointer())
    # Arguments: for reading, into the L2 cache, data. In the L1 cache it would evict data in use.
    _call_llvm_intrinsic(
        builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_INT32, number) for number in (0, 2, 1))
    )


load: Callable[[Float32 | UInt16, int], Vector] = _vector_intrinsic("ai", "v", emit_load)
"""Load LANES elements. Elements of a uint16 array are the bits of float16."""
load_low_nibbles: Callable[[UInt8, int], Vector] = _vector_intrinsic("ai", "v", _widening_load(8, _widen_low_nibbles))
"""Load bits 0 to 3 of LANES bytes, as numbers from 0 to 15."""
load_high_nibbles: Callable[[UInt8, int], Vector] = _vector_intrinsic("ai", "v", _widening_load(8, _widen_high_nibbles))
load_int8: Callable[[Int8, int], Vector] = _vector_intrinsic("ai", "v", _widening_load(8, _widen_int8))
load_bfloat16: Callable[[UInt16, int], Vector] = _vector_intrinsic("ai", "v", _widening_load(16, _widen_bfloat16))
store: Callable[[Float32, int, Vector], None] = _vector_intrinsic("aiv", "", emit_store)
broadcast: Callable[[Scalar], Vector] = _vector_intrinsic("f", "v", _emit_broadcast)
"""Return a vector with the same number in all lanes."""
load_broadcast: Callable[[Float32, int], Vector] = _vector_intrinsic("ai", "v", emit_load_broadcast)
"""Load one element of an array into all lanes."""
add: Callable[[Vector, Vector], Vector] = _vector_intrinsic("vv", "v", lambda builder, a, b: builder.fadd(a, b))
subtract: Callable[[Vector, Vector], Vector] = _vector_intrinsic("vv", "v", lambda builder, a, b: builder.fsub(a, b))
multiply: Callable[[Vector, Vector], Vector] = _vector_intrinsic("vv", "v", lambda builder, a, b: builder.fmul(a, b))
divide: Callable[[Vector, Vector], Vector] = _vector_intrinsic("vv", "v", lambda builder, a, b: builder.fdiv(a, b))
fma: Callable[[Vector, Vector, Vector], Vector] = _vector_intrinsic("vvv", "v", emit_fma)
"""Return a * b + c, rounded once."""
maximum: Callable[[Vector, Vector], Vector] = _vector_intrinsic("vv", "v", _emit_maximum)
"""Return the larger number in each lane. If one of the two is NaN, the result is the second argument."""
reduce_sum: Callable[[Vector], float] = _vector_intrinsic(
    "v", "f", _tree_reduction(lambda builder, a, b: builder.fadd(a, b))
)
reduce_max: Callable[[Vector], float] = _vector_intrinsic("v", "f", _tree_reduction(_emit_maximum))
exp: Callable[[Vector], Vector] = _vector_intrinsic("v", "v", _emit_exp)
"""Return e^x within 2 units in the last place. Below -87 the result is 0, above 88 it is e^88. exp(0) is 1, and NaN
stays NaN."""
select_range: Callable[[Vector, int, int, int, Scalar], Vector] = _vector_intrinsic("viiif", "v", _emit_select_range)
"""(vector, first, low, high, other): keep lane i if low <= first + i < high, else replace it by `other`."""
transpose: Callable[[Float32, Int64, int, int, Float32, int, int], None] = _vector_intrinsic(
    "aaiiaii", "", _emit_transpose
)
"""(source, row_offsets, first, column, target, at, stride): transpose a square of LANES rows and columns. Row i is the
LANES floats from source[row_offsets[first + i] + column]. It becomes lane i of the vectors at target[at], target[at +
stride], ..."""
prefetch: Callable[[Float32, int], None] = _vector_intrinsic("ai", "", _emit_prefetch)
"""Prefetch the cache line of an element."""
