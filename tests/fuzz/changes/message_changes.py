"""Changes of protobuf messages that leave them messages of their type, by the contract's descriptors."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz.changes.byte_changes import NUMBERS, NUMBERS_64, changed_bytes

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 100.0, 1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    " ",
    "\x00",
    "é",
    "😀",
    "x" * 300,
    "[]",
    "{}",
    '[{"role": "user", "content": "a"}]',
    "-1",
    "127.0.0.1:1",
)
_COUNTS = (0, 1, 2, 3, 16, 17, 31, 32, 33, 64, 128, 300)


def changed_message(data: bytes, kind: type[Message], choose: random.Random, known: Sequence[bytes] = ()) -> bytes:
    """Return the message with one to three changed fields. `known` are bytes that mean something to the service, such
    as a lease. One in ten changes is of bytes, and so is every change of what is no message."""
    message: Any = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return changed_bytes(data, choose)
    if choose.random() < 0.1:
        return changed_bytes(data, choose)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        change(message, choose, known)
    changed: bytes = message.SerializeToString()
    return changed


def change(message: Any, choose: random.Random, known: Sequence[bytes], depth: int = 0) -> None:
    """Change one field of a message, or of a message inside it."""
    fields = message.DESCRIPTOR.fields
    if not fields or depth > 6:
        return
    present = [field for field, _ in message.ListFields()]
    field = choose.choice(present) if present and choose.random() < 0.6 else choose.choice(fields)
    if choose.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_list(message, field, choose, known, depth)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        inside = getattr(message, field.name)
        inside.SetInParent()
        change(inside, choose, known, depth + 1)
    else:
        setattr(message, field.name, value_of(field, choose, known, getattr(message, field.name)))


def _change_list(message: Any, field: Any, choose: random.Random, known: Sequence[bytes], depth: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if values and choose.random() < 0.3:
        del values[choose.randrange(len(values)) :]
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if values and choose.random() < 0.6:
            change(choose.choice(values), choose, known, depth + 1)
            return
        for _ in range(choose.choice((1, 2, 40))):
            added = values.add()
            if len(values) > 1:
                added.CopyFrom(choose.choice(values[:-1]))
            change(added, choose, known, depth + 1)
    elif values and choose.random() < 0.5:
        at = choose.randrange(len(values))
        values[at] = value_of(field, choose, known, values[at])
    else:
        for _ in range(choose.choice((1, 2, 40))):
            values.append(value_of(field, choose, known, values[0] if values else None))


def value_of(field: Any, choose: random.Random, known: Sequence[bytes], now: Any) -> Any:
    """Return another value for a field that is no message."""
    kind = field.cpp_type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(choose, known, now or b"")
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return choose.choice((*_TEXTS, (now or "") + choose.choice(_TEXTS)))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return choose.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return choose.choice([*(value.number for value in field.enum_type.values), 99, -1])
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        near = [(now or 0) + 1, (now or 0) - 1, least, most]
        return min(most, max(least, choose.choice([*near, *(NUMBERS if most < 2**40 else NUMBERS_64)])))
    return choose.choice(_FLOATS)


def _bytes(choose: random.Random, known: Sequence[bytes], now: bytes) -> bytes:
    match choose.randrange(6):
        case 0 if known:
            return choose.choice(known)
        case 1:  # a column of int32
            count = choose.choice(_COUNTS)
            return struct.pack(f"<{count}i", *(choose.choice((0, 1, 5, 96, -1, 2**31 - 1)) for _ in range(count)))
        case 2:
            return choose.randbytes(choose.choice(_COUNTS))
        case 3:
            return b"h" * 32
        case _:
            return changed_bytes(now, choose) if now else choose.randbytes(choose.choice((4, 16, 32)))
