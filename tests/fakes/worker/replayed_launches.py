"""ReplayedLaunches: a Recorder for machines without a GPU. What is launched between `begin` and `end` runs, is kept,
and `replay` runs it again upon the very tensors: what the host computes in between is not asked again, as with a graph.

Triton's kernels must run under its interpreter, whose launches are kept whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided")


class Launches:
    """What one graph would be."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self.calls = calls

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self.calls:
            call()


class ReplayedLaunches:
    """Implements Recorder. `restore` at the end of its use gives the interpreter back."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._watch: _Watch | None = None
        self._execute = GridExecutor.__call__
        recorder = self

        def execute(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            # What the interpreter itself does with tensors is no launch.
            with _disable_current_modes():
                recorder._execute(executor, *args, **kwargs)
            if recorder._watch is not None:
                recorder._calls.append(lambda: recorder._execute(executor, *args, **kwargs))

        GridExecutor.__call__ = execute

    def restore(self) -> None:
        """Undo what was put into the interpreter."""
        GridExecutor.__call__ = self._execute

    def begin(self) -> None:
        assert self._watch is None
        self._calls = []
        self._watch = _Watch(self._calls)
        self._watch.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def end(self) -> Launches:
        assert self._watch is not None
        watch, self._watch = self._watch, None
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        return Launches(self._calls)

    def abandon(self) -> None:
        if self._watch is not None:
            self.end()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees torch's own operations, and keeps those that write something."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
            self._calls.append(lambda: func(*args, **kwargs))
        elif func._overloadpacket.__name__ not in _UNWRITTEN and not _same_memory(result, [*args, *kwargs.values()]):

            def again() -> None:
                result.copy_(func(*args, **kwargs))

            self._calls.append(again)
        return result


def _same_memory(result: Tensor, others: list[Any]) -> bool:
    """Whether the result is a view of one of the others."""
    memory = result.untyped_storage().data_ptr()
    return any(isinstance(each, Tensor) and each.untyped_storage().data_ptr() == memory for each in others)
