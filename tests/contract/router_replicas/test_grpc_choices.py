"""What the package chooses of gRPC is made before gRPC reads it, and gRPC still knows it."""

from __future__ import annotations

import os
import subprocess
import sys

from bench import ROOT

_OPEN = "import quire_common.transport, grpc; grpc.insecure_channel('127.0.0.1:1').close()"


def test_grpc_uses_the_chosen_experiments() -> None:
    """It complains of names that it does not know (any more), where it has read them at all."""
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run([sys.executable, "-c", _OPEN], env=unset, capture_output=True, text=True, check=True)
    assert not done.stderr
    told = f"import os, quire_common; os.environ['GRPC_EXPERIMENTS'] += ',-no_such_choice'; {_OPEN}"
    done = subprocess.run([sys.executable, "-c", told], env=unset, capture_output=True, text=True, check=True)
    assert done.stderr.count("Unknown experiment") == 1
    assert "no_such_choice" in done.stderr


def test_service_channels_keep_their_options() -> None:
    """Services import quire_common before gRPC, as the tests of channels do here; elsewhere gRPC may be first."""
    tests = ROOT / "tests/contract/common/test_channel.py"
    own = f"import sys, quire_common, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(tests)!r}]))"
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "PYTEST_"))}
    done = subprocess.run([sys.executable, "-c", own], env=unset, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
