"""Parsers that split an answer into reasoning, content and tool calls. See docs/tools.md."""
