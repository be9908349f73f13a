"""`quire key NAME`: a new API key, and the entry that lets it in. The key itself is shown once and kept nowhere."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys

HELP = "make an API key and its entry for the router's key file"
_SCOPES = ("inference", "metrics", "admin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Who it is for, and what it may do."""
    parser.add_argument("name", help="whom it stands for; keys of one name share caches and limits")
    parser.add_argument("--scope", action="append", choices=_SCOPES, help="may be repeated (default: inference)")
    parser.add_argument("--requests-per-minute", type=int, metavar="N", help="0: no limit (default: the router's)")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="0: no limit (default: the router's)")


def run(args: argparse.Namespace) -> int:
    """The key to standard error, the entry to standard output: `quire key alice >> keys.yaml` is safe."""
    key = f"quire-{secrets.token_urlsafe(32)}"
    entry = [
        f"  - name: {args.name}",
        f"    sha256: {hashlib.sha256(key.encode()).hexdigest()}",
        f"    scopes: [{', '.join(args.scope or ('inference',))}]",
    ]
    for limit in ("requests_per_minute", "tokens_per_minute"):
        value = getattr(args, limit)
        if value is not None:
            entry.append(f"    {limit}: {value}")
    print("\n".join(entry))
    print(f"key (shown once): {key}\nThe entry belongs under `keys:` in the file of --api-key-file.", file=sys.stderr)
    return 0
