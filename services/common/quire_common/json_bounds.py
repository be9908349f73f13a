"""How much structure a JSON text may have before it is parsed: parsers run in one piece, and nothing else meanwhile.

A text of 4 MiB parses in 10 ms as one string, in 600 ms as a million empty lists. Linear, and it counts alone.
"""

from __future__ import annotations

from quire_common.errors import InvalidArgument

# Lists, objects and members of objects; 10,000 messages of several parts each have fewer.
MAX_STRUCTURE = 128 * 1024
_MAX_QUOTES = 4 * MAX_STRUCTURE


def check_structure(text: bytes, param: str = "") -> None:
    """Raise InvalidArgument for JSON with more than 128 Ki lists, objects and members, or more than 256 Ki strings.
    Only characters outside strings count. The text is not parsed, and texts of up to 128 KiB are not looked at."""
    if len(text) <= MAX_STRUCTURE or (_marks(text) <= MAX_STRUCTURE and text.count(b'"') <= _MAX_QUOTES):
        return
    # Text inside strings does not count.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') <= _MAX_QUOTES and _marks(b"".join(bare.split(b'"')[::2])) <= MAX_STRUCTURE:
        return
    raise InvalidArgument(
        "TOO_MANY_VALUES",
        f"The JSON has more than {MAX_STRUCTURE} lists, objects and members.",
        "Send fewer values, or split the request.",
        param=param,
    )


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")
