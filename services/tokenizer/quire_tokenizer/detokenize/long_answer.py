"""Cuts an answer whose texts are too long for one message into parts. If a part is full, the text of a row is cut.

The last part of a row's text carries the row's token count and its end. This module knows nothing of protobuf.
"""

from __future__ import annotations

from quire_tokenizer.detokenize.detokenizer import StepText

# Most characters of a part; a character takes 4 bytes at most.
MOST_CHARS = 64 * 1024


def in_parts(answer: StepText) -> list[tuple[StepText, bool]]:
    """Cut the answer into parts of at most MOST_CHARS characters. Returns (part, goes_on) for each part; with
    `goes_on`, the text of the part's last row continues in the next part. A row's stop index, token count and offsets
    come with the end of its text; errors, parsed parts and reasoning counts are in the first part."""
    parts: list[tuple[StepText, bool]] = []
    part = StepText(errors=answer.errors, parts=answer.parts, reasoning_tokens=answer.reasoning_tokens)
    chars, offsets_told, asked = 0, 0, set(answer.offset_handles)
    for handle, text, stop_index, used in zip(answer.handle, answer.text, answer.stop_index, answer.used, strict=True):
        at = 0
        while chars + len(text) - at > MOST_CHARS:
            room = MOST_CHARS - chars
            if room:
                part.add_row(handle, text[at : at + room], -1, 0)
            parts.append((part, room > 0))
            part, chars, at = StepText(), 0, at + room
        part.add_row(handle, text[at:], stop_index, used)
        chars += len(text) - at
        if handle in asked:
            part.add_offsets(answer.offsets[offsets_told : offsets_told + used])
            offsets_told += used
    return [*parts, (part, False)]
