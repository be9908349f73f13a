"""The symbols that take other characters' places while a conversation is rendered. Imports nothing: all sides share it.

SignWriting: symbols without case, width or normal forms, and printable, so that Python's repr, which some templates
show, does not escape them as it would private characters. Rare in text; where they are met, another block is taken.
"""

FIRST, LAST = 0x1D800, 0x1D9FF
BLOCK = 16
# Put at the end of a message that is to be continued; no block reaches it.
CONTINUATION_MARK = chr(LAST)
# A regular expression's range.
RANGE = f"{chr(FIRST)}-{chr(LAST)}"
