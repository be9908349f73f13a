"""Benchmarks. README.md lists the programs, and LOG.md has their results."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "bench" / "LOG.md"
