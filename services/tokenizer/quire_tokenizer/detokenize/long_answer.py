"""An answer whose texts are too long for one message, in parts: a row's text is cut where a part is full.

What a row counts, and how it ended, is told with the last part of its text. Knows nothing of protobuf.
"""

from __future__ import annotations

from quire_tokenizer.detokenize.detokenizer import StepText

# Most characters of a part; a character takes 4 bytes at most.
MOST_CHARS = 64 * 1024


def in_parts(answer: StepText) -> list[tuple[StepText, bool]]:
    """Cut the answer into parts of at most MOST_CHARS characters. Returns each with whether its last row's text goes on
    in the next one."""
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
