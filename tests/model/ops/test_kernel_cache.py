"""Cached CPU kernels compute the same bits. Damaged code, and code that others can write, is not loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire_worker.ops.cpu.job import compile_job_kernel
from quire_worker.ops.cpu.kernel_cache import KernelCache
from quire_worker.ops.cpu.object_code import compile_object, load_object
from quire_worker.ops.cpu.row_kernels import rms_norm_rows

# Prints how many kernels numba compiled, and the result of one kernel.
PROGRAM = """
import numpy as np
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, _event): compiled.append(1)
    def on_end(self, _event): pass
event.register("numba:compile", Listener())
from quire_worker.ops.cpu.job import compile_job_kernel
from quire_worker.ops.cpu.row_kernels import silu_and_mul_rows
import ctypes
address = compile_job_kernel(silu_and_mul_rows, "gate")
function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)
gate = np.random.default_rng(3).standard_normal((4, 64), dtype=np.float32)
out = np.zeros((4, 32), np.float32)
arguments = np.array([gate.ctypes.data, out.ctypes.data, 32], np.int64)
function(0, 4, arguments.ctypes.data)
print(len(compiled), out.tobytes().hex())
"""


def run(folder: Path) -> tuple[int, str]:
    """Return the number of kernels that a new process compiled, and the result of one."""
    environment = os.environ | {"QUIRE_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    compiled, result = done.stdout.split()
    return int(compiled), result


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("kernels/*/*") if path.is_file()]


def test_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path: Path) -> None:
    first, result = run(tmp_path)
    assert first > 0
    assert run(tmp_path) == (0, result)


def test_damaged_code_is_not_loaded_but_compiled_again(tmp_path: Path) -> None:
    first, result = run(tmp_path)
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    assert run(tmp_path) == (first, result)
    assert run(tmp_path) == (0, result)


@pytest.mark.deep
def test_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    compiled, _ = run(blocked)
    assert compiled > 0


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_code_that_others_may_have_written_is_not_loaded(mode: int, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, "build")
    cache.store("kernel", b"code")
    assert cache.load("kernel") == b"code"
    (tmp_path / "build").chmod(mode)
    assert cache.load("kernel") is None
    cache.store("other", b"code")
    (tmp_path / "build").chmod(0o700)
    assert cache.load("other") is None


def test_code_in_a_folder_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path, "build")
    cache.store("kernel", b"code")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "build").stat().st_uid + 1)
    assert cache.load("kernel") is None


def test_shortened_code_is_not_loaded(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, "build")
    cache.store("kernel", b"code")
    (entry,) = (tmp_path / "build").iterdir()
    for length in (0, 5, 32, entry.stat().st_size - 1):
        entry.write_bytes(entry.read_bytes()[:length])
        assert cache.load("kernel") is None
        cache.store("kernel", b"code")


def test_versions_do_not_share_code_and_old_ones_are_removed(tmp_path: Path) -> None:
    old, recent, new = (KernelCache(tmp_path, build) for build in ("old", "recent", "new"))
    old.store("kernel", b"old")
    recent.store("kernel", b"recent")
    os.utime(tmp_path / "old", (0, 0))
    assert new.load("kernel") is None
    new.store("kernel", b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"recent", "new"}
    assert (recent.load("kernel"), new.load("kernel")) == (b"recent", b"new")


def test_two_kernels_of_one_name_are_refused() -> None:
    def other(_begin: int, _end: int, _arguments: object) -> None:
        pass

    compile_job_kernel(rms_norm_rows, "rms_norm_rows")
    with pytest.raises(ValueError, match="rms_norm_rows"):
        compile_job_kernel(other, "rms_norm_rows")


def test_objects_whose_inner_functions_have_the_same_name_do_not_share_them() -> None:
    """Kernels of two processes may have such names, because numba numbers functions in each process."""
    addresses = []
    for number in (1, 2):
        llvm_ir = f"""
define linkonce_odr i64 @inner() noinline {{
  ret i64 {number}
}}
define void @entry(i64 %begin, i64 %end, ptr %arguments) {{
  %value = call i64 @inner()
  store i64 %value, ptr %arguments
  ret void
}}"""
        symbol = f"entry of test {number}"
        addresses.append(load_object(compile_object(llvm_ir, "entry", symbol), symbol))
    for number, address in zip((1, 2), addresses, strict=True):
        out = np.zeros(1, np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)(0, 0, out.ctypes.data)
        assert out[0] == number


def test_object_without_the_function_is_refused() -> None:
    code = compile_object("define void @entry() {\n  ret void\n}", "entry", "entry that is there")
    with pytest.raises(RuntimeError, match="does not define"):
        load_object(code, "entry that is not there")
