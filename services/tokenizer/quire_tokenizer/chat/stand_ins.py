"""The symbols that replace other characters while a conversation is rendered. This module imports nothing, because all
processes share it.

The symbols are from the Unicode block SignWriting. They have no case, width or normal forms. They are printable, so
Python's repr, which some templates use, does not escape them as it escapes private characters. They are rare in text;
if a text contains them, another block is used.
"""

FIRST, LAST = 0x1D800, 0x1D9FF
BLOCK = 16
# Put at the end of a message that is to be continued; no block reaches it.
CONTINUATION_MARK = chr(LAST)
# A regular expression's range.
RANGE = f"{chr(FIRST)}-{chr(LAST)}"
