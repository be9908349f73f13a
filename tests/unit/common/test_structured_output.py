"""Constraints between services: the digest, what services refuse, and the capability of a worker that applies them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import common_pb2 as pb
from quire_common.columns import i32
from quire_common.errors import InvalidArgument, QuireError, Unsupported
from quire_common.sequence import Sequence, Stop, sequence_from_pb, sequence_to_pb
from quire_common.structured.capability import (
    STRUCTURED_OUTPUT,
    capability_for,
    check_capable,
    structured_outputs_in,
)
from quire_common.structured.constraint import (
    LLGUIDANCE_VERSION,
    MAX_GRAMMAR_BYTES,
    Constraint,
    constraint_from_pb,
    constraint_to_pb,
)

ROOT = Path(__file__).resolve().parents[3]
PLAIN = Sequence(i32(b"\1\0\0\0", "ids"), Stop(3))


def test_the_version_that_engines_tell_is_the_one_that_is_installed_and_pinned() -> None:
    assert version("llguidance") == LLGUIDANCE_VERSION
    for name in ("constraints.txt", "services/tokenizer/pyproject.toml", "services/worker/pyproject.toml"):
        assert re.findall(r"llguidance==([\d.]+)", (ROOT / name).read_text()) == [LLGUIDANCE_VERSION]


@given(st.text(max_size=100))
def test_a_constraint_survives_the_wire(text: str) -> None:
    sequence = dataclasses.replace(PLAIN, constraint=Constraint.of(text))
    assert sequence_from_pb(sequence_to_pb(sequence)).constraint == sequence.constraint
    assert Constraint.of(text).digest == hashlib.sha256(b"llguidance\0" + text.encode()).digest()


def test_a_sequence_without_a_constraint_stays_so() -> None:
    message = sequence_to_pb(PLAIN)
    assert not message.HasField("constraint") and sequence_from_pb(message).constraint is None


@pytest.mark.parametrize(
    "change, error, code",
    [
        (pb.Constraint(kind="regex"), InvalidArgument, "CONSTRAINT_NOT_COMPILED"),
        (pb.Constraint(digest=b"0" * 32), InvalidArgument, "CONSTRAINT_DIGEST_WRONG"),
        (pb.Constraint(text="start: /b/"), InvalidArgument, "CONSTRAINT_DIGEST_WRONG"),
        (pb.Constraint(text="ä" * (MAX_GRAMMAR_BYTES // 2 + 1)), InvalidArgument, "GRAMMAR_TOO_LARGE"),
    ],
)
def test_what_no_tokenizer_compiled_is_refused(change: pb.Constraint, error: type[QuireError], code: str) -> None:
    message = constraint_to_pb(Constraint.of("start: /a/"))
    constraint_from_pb(message)
    message.MergeFrom(change)
    with pytest.raises(error) as caught:
        constraint_from_pb(message)
    assert (caught.value.code, caught.value.param) == (code, "constraint")


def test_engines_without_structured_output_or_of_another_version_are_told_apart() -> None:
    check_capable(["top_k", STRUCTURED_OUTPUT])
    assert structured_outputs_in(["top_k", STRUCTURED_OUTPUT]) == (STRUCTURED_OUTPUT,)
    assert structured_outputs_in(["top_k"]) == ()
    for capabilities, named in (((), "cannot apply"), (("structured_output:llguidance-1.0.0",), "llguidance-1.0.0")):
        with pytest.raises(Unsupported, match=named) as caught:
            check_capable(capabilities, Constraint.of("start: /a/"))
        assert caught.value.code == "STRUCTURED_OUTPUT_UNSUPPORTED"


def test_constraint_goes_to_engines_of_the_version_for_which_it_was_compiled() -> None:
    other = Constraint.of("start: /a/", "1.0.0")
    assert capability_for(Constraint.of("start: /a/")) == STRUCTURED_OUTPUT
    assert other != Constraint.of("start: /a/") and other.digest == Constraint.of("start: /a/").digest
    assert constraint_from_pb(constraint_to_pb(other)) == other
    check_capable(["structured_output:llguidance-1.0.0"], other)
    check_capable([STRUCTURED_OUTPUT, "structured_output:llguidance-1.0.0"], other)
    with pytest.raises(Unsupported, match=r"llguidance-1\.0\.0"):
        check_capable([STRUCTURED_OUTPUT], other)


def test_constraint_of_a_tokenizer_that_does_not_say_its_version_is_of_the_first() -> None:
    message = constraint_to_pb(Constraint.of("start: /a/"))
    message.ClearField("version")
    assert constraint_from_pb(message).version == "1.9.1"
