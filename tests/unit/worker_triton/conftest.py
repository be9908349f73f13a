"""Without a GPU the kernels run under Triton's interpreter, which must be chosen before any kernel is imported."""

from __future__ import annotations

from bench.gpu_checks.interpreter import choose_interpreter

choose_interpreter()
