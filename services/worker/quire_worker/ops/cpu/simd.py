"""Sixteen floats at once, as words for compiled kernels: what a kernel says is what the processor does.

Left to itself the compiler does not vectorise loops whose arrays might overlap, nor sums, whose order it must keep.
Here the order is written down, so a row's results have the same bits in whatever company a kernel computes it. Nothing
in this file knows of models; no word checks bounds. Lanes are float32; `at` counts elements of a flat array, which may
hold narrower numbers where a word says so.
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
"""True where kernels are compiled for 32 registers of 16 floats; NUMBA_CPU_FEATURES can turn it off."""
Vector = Any
"""[LANES] float32 in a register: it exists within kernels alone."""
Number = float | np.float32
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Emit = Callable[..., Any]
"""(builder, LLVM values of the arguments) -> LLVM value of the result."""

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
LLVM_VECTOR: Final = ir.VectorType(_FLOAT, LANES)
"""A `Vector` as LLVM's type, for those who emit code."""
_INTS = ir.VectorType(_INT, LANES)
_ALIGN: Final = 4
_LOG2_E: Final = 1.44269504088896341
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
_ROUNDER: Final = 12582912.0
"""1.5 * 2^23: added to a small number, it leaves the nearest integer in the low bits."""
_EXP_TERMS: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_LEAST: Final = -87.0
_EXP_MOST: Final = 88.0


def kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compiled at its first call, in memory; runs without the interpreter's lock."""
    return cast("Callable[_P, _T]", numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function))


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Any) -> None:
        super().__init__(manager, vector, LLVM_VECTOR)  # type: ignore[no-untyped-call]  # numba's is not annotated


_NUMBA_VECTOR = _VectorType()
_RESULTS: Final = {"v": _NUMBA_VECTOR, "f": types.float32, "": types.void}


def _word(arguments: str, result: str, emit: _Emit) -> Any:
    """Kinds of arguments: v vector, f float, i integer, a flat array (of which `emit` gets the first address)."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        ready = []
        for kind, given, value in zip(arguments, signature.args, values, strict=True):
            if kind == "a":
                # Straight from the structure: numba's own helper writes all of it to memory first, at every word.
                place = context.data_model_manager[given].get_field_position("data")
                ready.append(builder.extract_value(value, place))
            elif kind == "v":
                ready.append(value)
            else:
                ready.append(context.cast(builder, value, given, types.float32 if kind == "f" else types.intp))
        made = emit(builder, *ready)
        return made if result else context.get_dummy_value()

    def define(_context: Any, *given: Any) -> Any:
        return _RESULTS[result](*given), generate

    parameters = ["context", *(f"argument{number}" for number in range(len(arguments)))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    define.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in parameters])  # type: ignore[attr-defined]  # how numba counts parameters
    return intrinsic(define)


def _constant(value: float, kind: Any = LLVM_VECTOR) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _address(builder: Any, array: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(array, [at]), LLVM_VECTOR.as_pointer())


def emit_load(builder: Any, array: Any, at: Any) -> Any:
    """Emit `load`; `array` is a pointer to the first element."""
    if array.type.pointee == ir.IntType(16):
        return _load_float16(builder, array, at)
    return builder.load(_address(builder, array, at), align=_ALIGN)


def _narrow(bits: int, widen: Callable[[Any, Any], Any]) -> _Emit:
    """LANES numbers of so many bits, as `widen` makes them floats."""
    kind = ir.VectorType(ir.IntType(bits), LANES)

    def emit(builder: Any, array: Any, at: Any) -> Any:
        address = builder.bitcast(builder.gep(array, [at]), kind.as_pointer())
        return widen(builder, builder.load(address, align=bits // 8))

    return emit


def _low(builder: Any, octets: Any) -> Any:
    return builder.sitofp(builder.and_(builder.zext(octets, _INTS), _constant(15, _INTS)), LLVM_VECTOR)


def _high(builder: Any, octets: Any) -> Any:
    return builder.sitofp(builder.lshr(builder.zext(octets, _INTS), _constant(4, _INTS)), LLVM_VECTOR)


def _octets(builder: Any, octets: Any) -> Any:
    return builder.sitofp(builder.sext(octets, _INTS), LLVM_VECTOR)


def _brain(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(words, _INTS), _constant(16, _INTS)), LLVM_VECTOR)


def _half(builder: Any, words: Any) -> Any:
    return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), LLVM_VECTOR)


_load_float16 = _narrow(16, _half)


def emit_store(builder: Any, array: Any, at: Any, value: Any) -> None:
    """Emit `store`."""
    builder.store(value, _address(builder, array, at), align=_ALIGN)


def _spread(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(LLVM_VECTOR, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, ir.Constant(LLVM_VECTOR, ir.Undefined), _constant(0, _INTS))


def emit_spread_from(builder: Any, array: Any, at: Any) -> Any:
    """Emit `spread_from`."""
    return _spread(builder, builder.load(builder.gep(array, [at]), align=_ALIGN))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit `fma`."""
    return _call(builder, "llvm.fma.v16f32", LLVM_VECTOR, a, b, c)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _fold(combine: Callable[[Any, Any, Any], Any]) -> _Emit:
    """All lanes to one, halves upon halves: always in the same order."""

    def emit(builder: Any, value: Any) -> Any:
        distance = LANES // 2
        while distance:
            partners = [(lane + distance) % LANES for lane in range(LANES)]
            other = builder.shuffle_vector(value, ir.Constant(LLVM_VECTOR, ir.Undefined), ir.Constant(_INTS, partners))
            value = combine(builder, value, other)
            distance //= 2
        return builder.extract_element(value, ir.Constant(_INT, 0))

    return emit


def _exp(builder: Any, value: Any) -> Any:
    # Comparisons are false for NaN: where either arm may be kept, it is the one that holds the NaN.
    most, least = _constant(_EXP_MOST), _constant(_EXP_LEAST)
    x = builder.select(builder.fcmp_ordered(">", value, most), most, value)
    tiny = builder.fcmp_ordered("<", x, least)
    x = builder.select(tiny, least, x)
    shifted = emit_fma(builder, x, _constant(_LOG2_E), _constant(_ROUNDER))
    whole = builder.fsub(shifted, _constant(_ROUNDER))
    rest = emit_fma(builder, whole, _constant(-_LN2_LOW), emit_fma(builder, whole, _constant(-_LN2_HIGH), x))
    series = _constant(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = emit_fma(builder, series, rest, _constant(term))
    series = emit_fma(builder, series, builder.fmul(rest, rest), builder.fadd(rest, _constant(1.0)))
    power = builder.shl(builder.bitcast(shifted, _INTS), _constant(23, _INTS))
    power = builder.bitcast(builder.add(power, _constant(127 << 23, _INTS)), LLVM_VECTOR)
    return builder.select(tiny, _constant(0.0), builder.fmul(series, power))


def _only(builder: Any, value: Any, first: Any, low: Any, high: Any, other: Any) -> Any:
    first, low, high = (_spread_int(builder, each) for each in (first, low, high))
    place = builder.add(first, ir.Constant(_INTS, list(range(LANES))))
    inside = builder.and_(builder.icmp_signed(">=", place, low), builder.icmp_signed("<", place, high))
    return builder.select(inside, value, _spread(builder, other))


def _spread_int(builder: Any, value: Any) -> Any:
    none = ir.Constant(_INTS, ir.Undefined)
    single = builder.insert_element(none, builder.trunc(value, _INT), ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, none, _constant(0, _INTS))


def _transpose(
    builder: Any, source: Any, places: Any, first: Any, offset: Any, target: Any, at: Any, step: Any
) -> None:
    size = first.type
    rows = []
    for row in range(LANES):
        place = builder.load(builder.gep(places, [builder.add(first, ir.Constant(size, row))]))
        rows.append(emit_load(builder, source, builder.add(place, offset)))
    distance = LANES // 2
    while distance:
        # Swap the off-diagonal halves of every square of this size.
        low = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        high = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & distance:
                a, b = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(a, b, ir.Constant(_INTS, low))
                rows[row + distance] = builder.shuffle_vector(a, b, ir.Constant(_INTS, high))
        distance //= 2
    for row in rows:
        emit_store(builder, target, at, row)
        at = builder.add(at, step)


def _prefetch(builder: Any, array: Any, at: Any) -> None:
    pointer = builder.bitcast(builder.gep(array, [at]), ir.IntType(8).as_pointer())
    # For reading, into the second cache: into the first, it would push out what is being worked on.
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_INT, number) for number in (0, 2, 1)))


load: Callable[[Float32 | UInt16, int], Vector] = _word("ai", "v", emit_load)
"""Of an array of uint16: their bits as float16."""
load_low_nibbles: Callable[[UInt8, int], Vector] = _word("ai", "v", _narrow(8, _low))
"""Bits 0-3 of bytes, 0 to 15."""
load_high_nibbles: Callable[[UInt8, int], Vector] = _word("ai", "v", _narrow(8, _high))
load_int8: Callable[[Int8, int], Vector] = _word("ai", "v", _narrow(8, _octets))
load_bfloat16: Callable[[UInt16, int], Vector] = _word("ai", "v", _narrow(16, _brain))
store: Callable[[Float32, int, Vector], None] = _word("aiv", "", emit_store)
spread: Callable[[Number], Vector] = _word("f", "v", _spread)
"""The same number in all lanes."""
spread_from: Callable[[Float32, int], Vector] = _word("ai", "v", emit_spread_from)
"""One element of an array in all lanes."""
add: Callable[[Vector, Vector], Vector] = _word("vv", "v", lambda builder, a, b: builder.fadd(a, b))
subtract: Callable[[Vector, Vector], Vector] = _word("vv", "v", lambda builder, a, b: builder.fsub(a, b))
multiply: Callable[[Vector, Vector], Vector] = _word("vv", "v", lambda builder, a, b: builder.fmul(a, b))
divide: Callable[[Vector, Vector], Vector] = _word("vv", "v", lambda builder, a, b: builder.fdiv(a, b))
fma: Callable[[Vector, Vector, Vector], Vector] = _word("vvv", "v", emit_fma)
"""a * b + c, rounded once."""
larger: Callable[[Vector, Vector], Vector] = _word("vv", "v", _larger)
"""Of a NaN and a number: the second argument."""
total: Callable[[Vector], float] = _word("v", "f", _fold(lambda builder, a, b: builder.fadd(a, b)))
largest: Callable[[Vector], float] = _word("v", "f", _fold(_larger))
exp: Callable[[Vector], Vector] = _word("v", "v", _exp)
"""Within 2 units in the last place; 0 below -87, as for 88 above it; exp(0) is 1; NaN stays NaN."""
only: Callable[[Vector, int, int, int, Number], Vector] = _word("viiif", "v", _only)
"""(vector, first, low, high, other): lane i where low <= first + i < high, else `other`."""
transpose: Callable[[Float32, Int64, int, int, Float32, int, int], None] = _word("aaiiaii", "", _transpose)
"""(source, places, first, offset, target, at, step): LANES floats from each source[places[first + i] + offset] become
lane i of the vectors at target[at], target[at + step], ..."""
prefetch: Callable[[Float32, int], None] = _word("ai", "", _prefetch)
"""Begin to load the cache line of an element."""
