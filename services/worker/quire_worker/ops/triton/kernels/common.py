"""Functions that all kernels share: the switch for the interpreter, the two halves of programmatic dependent launch
(PDL), and an integer order of floats.

Under the interpreter, bf16 arithmetic is silently wrong (Triton 3.6). So under the interpreter every load is cast to
float32, and matrix products take float32. On a device they take bf16.

With PDL a kernel starts while the kernel before it still runs. `wait` returns when that kernel has ended and its writes
are visible. Before `wait`, a kernel may read only data that no step writes (weights), or that was uploaded before the
step. Each kernel that is launched with PDL must call `wait`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Mapping


class Offsets(tl.constexpr):  # type: ignore[misc]  # Triton's classes have no types
    """Offsets by name, as constants of kernels. `offsets.name` in a kernel is an integer of the compiled code, and a
    part of the key under which the compiled code is cached."""

    def __init__(self, offsets: Mapping[str, int]) -> None:
        super().__init__(SimpleNamespace(**offsets))

    def __getattr__(self, name: str) -> int:
        if name == "value" or name.startswith("__"):
            raise AttributeError(name)  # of a copy that is not complete yet
        found: int = getattr(self.value, name)
        return found


INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before this one on the stream has ended and its writes are visible. Without PDL, do
    nothing."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel on the stream start, which may run the part before its own `wait`. Without PDL, do
    nothing."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_lines(place, ELEMENTS: tl.constexpr, WANTED: tl.constexpr):
    """Prefetch ELEMENTS elements from `place` on into the L2 cache, if WANTED. The L2 cache sees later writes of other
    programs, so a kernel may prefetch before `wait`."""
    if WANTED:
        LINE: tl.constexpr = 1024 // place.dtype.element_ty.primitive_bitwidth
        line = (place + tl.arange(0, ELEMENTS // LINE) * LINE).to(tl.int64)
        fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(fetch, "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def system_fence(lane):
    """Order the loads of a thread: all loads before this fence come before all loads after it, also with respect to the
    host's memory. `lane` has an element for each thread."""
    if not INTERPRET:
        fence: tl.constexpr = "fence.acq_rel.sys; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(fence, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_system_words(pointer):
    """Load four int32 from each of some addresses in the host's memory. The addresses are multiples of 16. The loads go
    past all caches, and are one request where possible."""
    if INTERPRET:
        return (
            tl.load(pointer, volatile=True),
            tl.load(pointer + 1, volatile=True),
            tl.load(pointer + 2, volatile=True),
            tl.load(pointer + 3, volatile=True),
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [pointer.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def operand(x, LIKE: tl.constexpr):
    """Convert a value to the type that a matrix product takes: the memory's type, or float32 under the interpreter."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x.to(LIKE)


@triton.jit
def load_heads(place, lane, DIM: tl.constexpr, LANES: tl.constexpr):
    """Load rows of heads of DIM elements as rows of LANES elements, a power of two. The elements after the head are
    zero."""
    if LANES == DIM:
        return tl.load(place)
    else:
        return tl.load(place, mask=(lane < DIM)[None, :], other=0.0)


@triton.jit
def within_heads(real, lane, DIM: tl.constexpr, LANES: tl.constexpr):
    """Return the mask [rows, LANES], or [rows, 1] if LANES is DIM, of the elements in rows where `real` [rows] holds
    and in lanes below DIM."""
    if LANES == DIM:
        return real[:, None]
    else:
        return real[:, None] & (lane < DIM)[None, :]


@triton.jit
def ordered(x):
    """Convert float32 to int32 with the same order: -0.0 comes below 0.0, and a NaN beyond the infinity of its sign."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """Convert the int32 of `ordered` back to float32."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def fast_log(x):
    """Compute the natural logarithm of a normal number, with an absolute or relative error of 2e-7, whichever is
    larger."""
    if INTERPRET:
        return tl.log(x)
    else:
        # Triton's own function also takes subnormal numbers, which costs more than the logarithm.
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        two = tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return 0.6931471805599453 * two
