"""`quire key NAME`: makes an API key, and the entry that admits it. The key itself is shown once and not stored."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys

HELP = "make an API key and its entry for the router's key file"
_SCOPES = ("inference", "metrics", "admin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the owner of the key, and its rights and limits."""
    parser.add_argument("name", help="whom it stands for; keys of one name share caches and limits")
    parser.add_argument("--header", action="store_true", help="print `keys:` before it, which begins a new file")
    parser.add_argument("--scope", action="append", choices=_SCOPES, help="may be repeated (default: inference)")
    parser.add_argument("--model", action="append", help="a model that it may use; may be repeated (default: all)")
    parser.add_argument("--requests-per-minute", type=int, metavar="N", help="0: no limit (default: the router's)")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="0: no limit (default: the router's)")


def run(args: argparse.Namespace) -> int:
    """Make a key. The key goes to standard error, and its entry, with the key's SHA-256 instead of the key, to standard
    output; no file is written. `quire key --header alice > keys.yaml` makes the file, and `quire key bob >> keys.yaml`
    adds to it. Without --header, standard error also says where the entry belongs. Returns exit code 0."""
    key = f"quire-{secrets.token_urlsafe(32)}"
    entry = [
        *(("keys:",) if args.header else ()),
        f"  - name: {args.name}",
        f"    sha256: {hashlib.sha256(key.encode()).hexdigest()}",
        f"    scopes: [{', '.join(args.scope or ('inference',))}]",
    ]
    if args.model:
        entry.append(f"    models: {json.dumps(args.model)}")
    for limit in ("requests_per_minute", "tokens_per_minute"):
        value = getattr(args, limit)
        if value is not None:
            entry.append(f"    {limit}: {value}")
    print("\n".join(entry))
    print(f"key (shown once): {key}", file=sys.stderr)
    if not args.header:
        print(
            "The entry belongs under `keys:`, the first line of the file of --api-key-file (--header prints it).",
            file=sys.stderr,
        )
    return 0
