"""Without a GPU the kernels run under Triton's interpreter, which must be chosen before any kernel is imported."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_item(tensor: Any, scope: Any) -> None:
        """Triton 3.6 turns a bound of a loop into an int by a conversion that numpy 2.4 no longer makes."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_item
