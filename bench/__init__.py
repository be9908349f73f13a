"""Benchmarks. docs/benchmarks.md lists them, and LOG.md has what they found."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "bench" / "LOG.md"
