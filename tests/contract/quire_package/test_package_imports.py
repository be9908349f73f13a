from __future__ import annotations

import subprocess
import sys

import pytest

import quire


def test_import_of_quire_is_cheap() -> None:
    program = (
        "import sys, time\n"
        "began = time.process_time()\n"
        "import quire\n"
        "print(time.process_time() - began, *(m for m in ('grpc', 'google', 'asyncio', 'numpy') if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *modules = done.stdout.split()
    assert modules == []
    assert float(seconds) < 0.05


@pytest.mark.parametrize("name", quire.__all__)
def test_every_export_exists(name: str) -> None:
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_unknown_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.nothing
