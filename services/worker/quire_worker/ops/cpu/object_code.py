"""Compiles a kernel's LLVM IR, which numba makes, to a relocatable object, and loads objects into this process.

This module replaces numba's own cache on disk, which uses pickle and in which two entries may define the same symbol.
An object file of this module exports one symbol. A kernel runs from its object file even right after it was compiled.
So a kernel from the cache has the same machine code as a new one.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

_lock = threading.Lock()


def compile_object(llvm_ir: str, entry: str, symbol: str) -> bytes:
    """Compile optimized LLVM IR for this processor, and return the relocatable object. The function that the IR calls
    `entry` becomes `symbol`; all other definitions become internal."""
    module = llvm.parse_assembly(llvm_ir)
    for value in (*module.functions, *module.global_variables):
        if value.name == entry:
            value.name = symbol
        elif not value.is_declaration:
            value.linkage = "internal"
    module.verify()
    with _lock:
        code: bytes = _new_target_machine().emit_object(module)
    return code


def load_object(code: bytes, symbol: str) -> int:
    """Load an object of `compile_object`, and return the address of its function, which stays valid for the life of the
    process. Raises RuntimeError if the object does not define `symbol`."""
    with _lock:
        engine = _mcjit_engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = int(engine.get_function_address(symbol))
    if not address:
        raise RuntimeError(f"The object of a kernel does not define {symbol}.")
    return address


def _new_target_machine() -> Any:
    """Return a new target machine for this processor, with the options that numba uses."""
    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    target = llvm.Target.from_triple(triple)
    relocation = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        cpu=processor, features=features, opt=3, reloc=relocation, codemodel="jitdefault", jit=True
    )


@cache
def _mcjit_engine() -> Any:
    """Return the engine that holds all loaded objects. Start numba's runtime first, which allocates memory for running
    kernels."""
    rtsys.initialize(cpu_target.target_context)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _new_target_machine())
