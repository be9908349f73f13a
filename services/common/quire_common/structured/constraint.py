"""Constraint: a grammar that an answer must match, and its form in protobuf.

Users send JSON schemas, regular expressions and the like. A tokenizer compiles each of them to the canonical text of a
grammar for llguidance. A worker applies this text.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from quire.v1 import common_pb2 as pb
from quire_common.errors import InvalidArgument

COMPILED: Final = "llguidance"
MAX_GRAMMAR_BYTES: Final = 512 * 1024
LLGUIDANCE_VERSION: Final = "1.9.1"
"""The version of llguidance in this release. Two versions may allow different tokens for the same text."""
_UNSAID_VERSION: Final = "1.9.1"
_MAX_VERSION_CHARS: Final = 64
CONSTRAINT_PARAM: Final = "constraint"
"""The `param` of errors about a constraint. A router replaces it by the field that its client used."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar: text for `llguidance.LLMatcher`. An answer may end only where the grammar is complete."""

    text: str
    digest: bytes
    version: str = LLGUIDANCE_VERSION
    """The version of llguidance for which it was compiled."""

    @classmethod
    def of(cls, text: str, version: str = LLGUIDANCE_VERSION) -> Constraint:
        """Make a constraint of canonical text."""
        return cls(text, digest_of(text), version)


def digest_of(text: str) -> bytes:
    """Return the digest of a constraint: sha256 over kind, a NUL byte, and canonical text."""
    return sha256(b"\0".join((COMPILED.encode(), text.encode()))).digest()


def constraint_to_pb(constraint: Constraint) -> pb.Constraint:
    """Encode a constraint."""
    return pb.Constraint(kind=COMPILED, text=constraint.text, digest=constraint.digest, version=constraint.version)


def constraint_from_pb(message: pb.Constraint) -> Constraint:
    """Decode a compiled constraint. An absent version counts as 1.9.1, and a long one is cut to 64 characters. Raises
    InvalidArgument for another kind, a text that is too long, or a digest that does not belong to the text."""
    if message.kind != COMPILED:
        raise InvalidArgument(
            "CONSTRAINT_NOT_COMPILED",
            f"The constraint is of the kind {message.kind[:64]!r}, an engine takes {COMPILED!r} only.",
            "Let a tokenizer compile it: see CompileGrammar.",
            param=CONSTRAINT_PARAM,
        )
    if len(message.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            "GRAMMAR_TOO_LARGE",
            f"The constraint has more than {MAX_GRAMMAR_BYTES} bytes.",
            "Send a smaller grammar.",
            param=CONSTRAINT_PARAM,
        )
    constraint = Constraint.of(message.text, message.version[:_MAX_VERSION_CHARS] or _UNSAID_VERSION)
    if message.digest != constraint.digest:
        raise InvalidArgument(
            "CONSTRAINT_DIGEST_WRONG",
            "The constraint's digest is that of another text.",
            "Send the constraint as the tokenizer compiled it.",
            param=CONSTRAINT_PARAM,
        )
    return constraint
