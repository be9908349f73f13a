"""Constraint: a grammar that an answer must match, as tokenizers compile it and workers apply it.

Users write JSON schemas, regular expressions and the like. A tokenizer compiles each into canonical text of llguidance.
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
"""The version of llguidance in this release. Answers depend on it: two versions may allow other tokens."""
_UNSAID_VERSION: Final = "1.9.1"
_MAX_VERSION_CHARS: Final = 64
CONSTRAINT_PARAM: Final = "constraint"
"""The `param` of errors about a constraint, for which a router puts the field in which its client sent it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar: text that `llguidance.LLMatcher` takes. An answer may end only where it is complete."""

    text: str
    digest: bytes
    version: str = LLGUIDANCE_VERSION
    """The version of llguidance that is to apply it."""

    @classmethod
    def of(cls, text: str, version: str = LLGUIDANCE_VERSION) -> Constraint:
        """The constraint of canonical text."""
        return cls(text, digest_of(text), version)


def digest_of(text: str) -> bytes:
    """Name a constraint: sha256 over kind, a NUL byte, and canonical text."""
    return sha256(b"\0".join((COMPILED.encode(), text.encode()))).digest()


def constraint_to_pb(constraint: Constraint) -> pb.Constraint:
    """Domain to wire."""
    return pb.Constraint(kind=COMPILED, text=constraint.text, digest=constraint.digest, version=constraint.version)


def constraint_from_pb(message: pb.Constraint) -> Constraint:
    """Decode a compiled constraint. Raises InvalidArgument for another kind, a digest of another text, or a text that
    no tokenizer makes."""
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
