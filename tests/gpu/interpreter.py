"""Without a GPU kernels run under Triton's interpreter. It must be chosen before any kernel is imported."""

from __future__ import annotations

import os
from typing import Any

import torch


def choose_interpreter() -> bool:
    """Whether it was chosen: there is no GPU."""
    if torch.cuda.is_available():
        return False
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__name__ == "patch_with_item":
        return True

    def patch_with_item(tensor: Any, scope: Any) -> None:
        """Triton 3.6 turns a bound of a loop into an int by a conversion that numpy 2.4 no longer makes."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_item
    return True
