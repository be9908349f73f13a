"""`measure_row_bytes` measures the memory that a model's layers take for each row of a step, so that a worker can
divide the memory of a GPU.

The layers run on the meta device, which computes shapes and no values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from quire_worker.transformers_backend.attention import STEP_ATTENTION, AttentionCall, register_attention, use_attention
from quire_worker.transformers_backend.find_model import FoundModel, failures_as_unsupported
from quire_worker.transformers_backend.split_model import SplitModel

# With so many rows, memory that does not depend on their number is a small part.
_ROWS: Final = 1024


def measure_row_bytes(found: FoundModel) -> int:
    """Return the bytes that the layers take for each row of a step, in bfloat16 and without the weights, at their peak.
    A pass of 1024 rows on the meta device counts live tensors. Raises Unsupported for layers that do not compute in
    bfloat16."""
    register_attention()
    with failures_as_unsupported("UNSUPPORTED_DTYPE", found.architecture), torch.device("meta"), torch.inference_mode():
        model = found.build(STEP_ATTENTION, dtype=torch.bfloat16)
        weights = [*model.parameters(), *model.buffers()]
        split = SplitModel(model)
        token, position = torch.zeros(_ROWS, dtype=torch.int64), torch.arange(_ROWS)
        with use_attention(_ShapedRows()), _LiveBytes([*weights, token, position]) as live:
            split.hidden(token, position)
    most: int = live.most
    return -(-most // _ROWS)


class _ShapedRows:
    """An attention that takes as much memory as that of TransformersDecoder."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [1, R, Q, D] without values, after making the intermediate tensors that paged attention makes."""
        _, heads, rows, head_dim = call.query.shape
        parts = [each.transpose(1, 2).reshape(rows, -1) for each in (call.query * call.scale, call.key, call.value)]
        qkv = torch.cat(parts, dim=1)
        turned = qkv.new_empty(rows, heads * head_dim)
        return torch.empty_like(turned).view(1, rows, heads, head_dim)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts the bytes of the tensors that operations have made and that still exist."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.most: int = 0
        self._others: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()
        for each in others:
            self._others[each.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage not in self._others:
                    self._made[storage] = storage.nbytes()
        self.most = max(self.most, sum(self._made.values()))
        return result
