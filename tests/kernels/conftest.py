"""Without a GPU the kernels run under Triton's interpreter, which must be chosen before any kernel is imported."""

from __future__ import annotations

import sys

from tests.gpu.interpreter import choose_interpreter

# Each kernel is what it was when it was imported. A test elsewhere that imports one is collected too early.
if choose_interpreter() and (common := sys.modules.get("quire_worker.ops.triton.kernels.common")):
    assert common.INTERPRET, "kernels were imported before this folder's tests: such a test belongs here"
