"""Attention of long prompts that begin in a step. Such a prompt is *fresh*: all its keys are computed in this step, so
torch's own attention (cuDNN on Hopper) can compute it.

This attention uses no pages. It reads keys and values from the output of the linear layer. The library makes a plan for
each length, so lengths are padded. Attention is causal, so only padding rows see the rows after a prompt. It does not
work in captured graphs, nor with windows and soft caps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_worker.ops.interface import HeadShape

LEAST_TOKENS = 2048
"""Shorter prompts are computed faster together, as tiles of one kernel."""
PIECE = 256
_AT_A_TIME = 4


class Fresh(NamedTuple):
    """A prompt's first chunk: the index of its first row, and its number of tokens."""

    row: int
    tokens: int

    @property
    def padded(self) -> int:
        """Return the number of rows that are computed."""
        return padded_length(self.tokens)


Leave = Callable[[Fresh, Tensor], None]
"""A function that receives a chunk's rows [tokens, Q D], on the stream that computed them."""


def padded_length(tokens: int) -> int:
    """Return the length of the plan for this number of tokens."""
    return -(-tokens // PIECE) * PIECE


def fresh_attention(query: Tensor, qkv: Tensor, fresh: tuple[Fresh, ...], shape: HeadShape, leave: Leave) -> None:
    """Compute attention for the chunks' rows of query [R, Q D], and pass the result of each chunk to `leave`. qkv [R,
    (Q + 2 K) D] has rotated keys. Every chunk's padded rows must lie within R and hold numbers. On a GPU, up to four
    chunks run at a time, and call `leave`, on the current stream and others, for which the current stream waits at the
    end, also after an error. So other chunks use the parts of the device that are idle at a chunk's end or during a
    GEMM in `leave`."""
    if len(fresh) < 2 or not query.is_cuda:
        for chunk in fresh:
            leave(chunk, _attended(query, qkv, chunk, shape))
        return
    here, beside = torch.cuda.current_stream(), _more_streams()[: len(fresh) - 1]
    for stream in beside:
        stream.wait_stream(here)
    try:
        for chunk, stream in zip(fresh, itertools.cycle((here, *beside)), strict=False):
            with torch.cuda.stream(stream):
                leave(chunk, _attended(query, qkv, chunk, shape))
    finally:  # a step that runs again after an error must find nothing under way
        for stream in beside:
            here.wait_stream(stream)


def _attended(query: Tensor, qkv: Tensor, chunk: Fresh, shape: HeadShape) -> Tensor:
    """Return the attention of a chunk's rows, [tokens, Q D], by torch's causal attention over the chunk's own keys and
    values in qkv. It computes the padded rows and drops them."""
    heads, dim = shape.heads, shape.head_dim
    keys = heads * dim
    values = keys + shape.kv_heads * dim
    rows = slice(chunk.row, chunk.row + chunk.padded)
    q, k, v = (
        each.view(1, chunk.padded, -1, dim).transpose(1, 2)
        for each in (query[rows], qkv[rows, keys:values], qkv[rows, values:])
    )
    done = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=shape.score_scale, enable_gqa=heads != shape.kv_heads
    )
    return done.transpose(1, 2).reshape(chunk.padded, keys)[: chunk.tokens]


@functools.cache
def _more_streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(_AT_A_TIME - 1)]  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def best_backend(like: Tensor) -> Iterator[None]:
    """In this context, torch's attention uses only cuDNN, and fails where cuDNN cannot compute it, if `like` is a
    bfloat16 tensor on a GPU; otherwise nothing changes."""
    if like.is_cuda and like.dtype == torch.bfloat16:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield
    else:
        yield


class FreshPlans:
    """The plans of a model's fresh prompts. The first call of a length takes tens of milliseconds, so plans are made in
    advance, one at a time."""

    def __init__(self, shape: HeadShape, device: torch.device, most_tokens: int) -> None:
        self._shape = shape
        self._device = device
        self._missing = list(range(padded_length(LEAST_TOKENS), padded_length(most_tokens) + 1, PIECE))
        self.begun = not self._missing
        """Whether a plan was made, or no plan is wanted."""

    @staticmethod
    def suit(shape: HeadShape, sees_all: bool) -> bool:
        """Whether `fresh_attention` can compute a model's attention."""
        return sees_all and shape.softcap <= 0.0 and shape.head_dim <= 128 and shape.head_dim % 8 == 0

    @torch.inference_mode()
    def make(self) -> bool:
        """Set `begun`, and make the plan of the next missing length, if any, by attention over bfloat16 zeros of that
        length. Returns whether plans are left to make."""
        self.begun = True
        if self._missing:
            tokens, shape = self._missing.pop(0), self._shape
            width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            qkv = torch.zeros((tokens, width), dtype=torch.bfloat16, device=self._device)
            query = qkv[:, : shape.heads * shape.head_dim].contiguous()
            with best_backend(query):
                _attended(query, qkv, Fresh(0, tokens), shape)
        return bool(self._missing)
