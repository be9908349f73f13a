"""What all kernels share: the interpreter's switch, the two halves of programmatic dependent launch, and an order.

Under the interpreter bf16 arithmetic is silently wrong (Triton 3.6), so every load is cast to float32 and products are
fed float32 there; on a device products take bf16.

With PDL a kernel starts while the one before it still runs: `wait` returns once that one has ended and its writes are
visible, so a kernel may read what no step writes (weights), or was uploaded before the step, before it, and nothing
else. Each kernel must call it.
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
    """Offsets by name, constants of kernels: `offsets.name` in a kernel is an integer of the compiled code, and of the
    key by which compiled code is kept."""

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
    """Until the kernel before this one has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The kernel after this one may begin what it does before its own `wait`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_lines(place, ELEMENTS: tl.constexpr, WANTED: tl.constexpr):
    """So many elements from `place` on will be read soon: into the second cache with them. It sees what others write,
    so that this may be asked before `wait`."""
    if WANTED:
        LINE: tl.constexpr = 1024 // place.dtype.element_ty.primitive_bitwidth
        line = (place + tl.arange(0, ELEMENTS // LINE) * LINE).to(tl.int64)
        fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(fetch, "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def system_fence(lane):
    """All loads that a thread has done come before all that it does from here on, in the order in which the host sees
    memory too. `lane`: an element for each thread."""
    if not INTERPRET:
        fence: tl.constexpr = "fence.acq_rel.sys; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(fence, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_system_words(pointer):
    """Four int32 from each of some addresses, which are multiples of 16: from the host's memory, past all caches, and
    in one request where that is possible."""
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
    """A value as a matrix product takes it: in the memory's type, or float32 where the interpreter computes."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x.to(LIKE)


@triton.jit
def load_heads(place, lane, DIM: tl.constexpr, LANES: tl.constexpr):
    """Rows of heads of DIM elements as rows of LANES, a power of two, which are zero behind the head."""
    if LANES == DIM:
        return tl.load(place)
    else:
        return tl.load(place, mask=(lane < DIM)[None, :], other=0.0)


@triton.jit
def within_heads(real, lane, DIM: tl.constexpr, LANES: tl.constexpr):
    """The mask of rows [rows] for rows of LANES elements, of which a head has DIM."""
    if LANES == DIM:
        return real[:, None]
    else:
        return real[:, None] & (lane < DIM)[None, :]


@triton.jit
def ordered(x):
    """float32 -> int32 that sorts alike: -0.0 below 0.0, a NaN beyond the infinity of its sign."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """The inverse."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def fast_log(x):
    """Natural logarithm of a normal number: to 2e-7, or where that is more to 2e-7 of itself."""
    if INTERPRET:
        return tl.log(x)
    else:
        # Triton's own takes care of numbers that are not normal, which costs more than the logarithm.
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        two = tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return 0.6931471805599453 * two
