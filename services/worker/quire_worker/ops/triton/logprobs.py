"""Launcher of the logprob kernels, and the same function in torch. Both return one packed tensor with all that the host
needs.

Packed logprobs are int32 [L, 2 + 2 * most]. An entry has the logprob (the bits of a float32) and the rank of its token
(1: no logit is larger), then the ids of the `most` best tokens, then their logprobs. Logprobs are natural logarithms of
the raw logits' probabilities. Among equal logits the lower id comes first; 0.0 comes before -0.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.logprob import block_logprobs_kernel, merge_logprobs_kernel
from quire_worker.ops.triton.launch import options, power_of_two

_BLOCK, _BLOCK_WARPS = 1024, 1
_MERGE_WARPS = 8
# The kernel finds alternatives one after the other. From this number on, finding all at once is faster.
_MOST_IN_TURN = 32
# The number of rows that torch computes at a time, because it makes several 8-byte integers of each logit.
_AT_ONCE = 64


def packed_logprobs(logits: Tensor, token: Tensor, row: Tensor, most: int) -> Tensor:
    """Return packed logprobs [L, 2 + 2 * most] int32 of the rows [L] int32 of logits [N, V] and token [N] int32, by two
    kernels, or by torch for most > 32. most <= V. Logprobs of a negative token mean nothing."""
    if most > _MOST_IN_TURN:
        return torch.cat([torch_logprobs(logits, token, some, most) for some in torch.split(row, _AT_ONCE)])
    entries, vocab, device = len(row), logits.shape[1], logits.device
    block = min(_BLOCK, power_of_two(vocab))
    parts = -(-vocab // block)
    part_key = torch.empty((entries, parts), dtype=torch.int64, device=device)
    part_sum = torch.empty((entries, parts), dtype=torch.float32, device=device)
    part_above = torch.empty((entries, parts), dtype=torch.int32, device=device)
    packed = torch.empty((entries, 2 + 2 * most), dtype=torch.int32, device=device)
    block_logprobs_kernel[(entries, parts)](
        logits,
        row,
        token,
        part_key,
        part_sum,
        part_above,
        vocab,
        PARTS=parts,
        BLOCK=block,
        **options(pdl=False, num_warps=_BLOCK_WARPS),
    )
    merge_logprobs_kernel[(entries,)](
        logits,
        row,
        token,
        part_key,
        part_sum,
        part_above,
        packed,
        most,
        vocab,
        PARTS=parts,
        LANES=power_of_two(parts),
        BLOCK=block,
        **options(pdl=False, num_warps=_MERGE_WARPS),
    )
    return packed


def torch_logprobs(logits: Tensor, token: Tensor, row: Tensor, most: int) -> Tensor:
    """Return what `packed_logprobs` returns, by operations of torch, for any `most` up to V. `token` [N] has one id per
    row of `logits`; `row` [L] picks the rows."""
    rows = logits.index_select(0, row).float()
    sampled = token.index_select(0, row).clamp(min=0).long()[:, None]
    normaliser = torch.logsumexp(rows, dim=1, keepdim=True)
    chosen = rows.gather(1, sampled)
    rank = 1 + (rows > chosen).sum(dim=1, keepdim=True, dtype=torch.int32)
    bits = rows.view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    # One integer that sorts by logit, then by lower id.
    key = (ordered << 32) | (0x7FFFFFFF - torch.arange(rows.shape[1], device=logits.device))
    top_id = 0x7FFFFFFF - (key.topk(most, dim=1).values & 0xFFFFFFFF)
    top = rows.gather(1, top_id) - normaliser
    return torch.cat([(chosen - normaliser).view(torch.int32), rank, top_id.int(), top.view(torch.int32)], dim=1)
