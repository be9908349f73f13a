"""Generates the gRPC stubs of proto/quire/v1 into quire/v1. A build hook, and `make proto`."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, without hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]  # a stand-in, never instantiated

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Write message classes, type stubs and service stubs for every contract."""
    from importlib.resources import files

    from grpc_tools import protoc

    out = root / "quire" / "v1"
    out.mkdir(parents=True, exist_ok=True)
    contracts = sorted(str(p.relative_to(root / "proto")) for p in (root / "proto" / "quire" / "v1").glob("*.proto"))
    arguments = ["protoc", f"-I{root / 'proto'}", f"-I{files('grpc_tools') / '_proto'}"]
    arguments += [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(arguments + contracts) != 0:
        raise SystemExit("protoc failed: see its message above")


class StubsHook(BuildHookInterface):
    """Hatchling's entry point."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Generate before files are collected. An sdist ships the contracts; both kinds of wheel need the stubs."""
        if (Path(self.root) / "proto").is_dir():
            generate(Path(self.root))


if __name__ == "__main__":
    sys.path = [p for p in sys.path if p]
    generate()
