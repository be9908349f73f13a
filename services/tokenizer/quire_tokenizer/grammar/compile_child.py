"""A compiling process: sources of grammars in on stdin, canonical texts out on stdout, one at a time, as framed JSON.

It exists so that a schema that takes long, recurses or eats memory harms nobody: its memory and its processor time are
limited. A grammar counts as compiled once its first masks are there, since a part of the work is put off until then.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire_tokenizer.children.frames import limit_process, read_frame, write_frame
from quire_tokenizer.grammar.canonical_text import ModelOutputFormat, canonical_text
from quire_tokenizer.grammar.grammar_source import GrammarRefused, GrammarSource, bad_grammar, too_large
from quire_tokenizer.grammar.json_schema import error_line

_PAGE_BYTES: Final = resource.getpagesize()
# llguidance's messages about a keyword's value, by a part of the message.
_KEYWORDS: Final = {
    "Unknown format": "format",
    "look-around": "pattern",
    "regex parse error": "pattern",
    "min/maxProperties": "minProperties",
    "patternProperty regexes": "patternProperties",
    "not present in a registry": "$ref",
    "circular references": "$ref",
}
_TRIED_TOKENS: Final = 8
_TOO_COMPLEX: Final = ("fuel", "too many", "too complex", "too large", "limit exceeded")


class UnreadableVocabulary:
    """Stands for the compiler of a model whose vocabulary llguidance cannot read, such as WordPiece."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile nothing. Returns {"unreadable": ...}."""
        return {"unreadable": self._reason}


class Compiler:
    """Compiles for one model, which the first frame describes. Raises ValueError for an unreadable vocabulary."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._tokenizer = LLTokenizer(model["tokenizer"], eos_token=model["eos"] or None)
        self._output_format = ModelOutputFormat(model["added"], model["tool_parser"], model["reasoning_parser"])

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile one source. Returns {"text": ..., "warnings": ...}, or {"refused": ...}; never raises."""
        try:
            text, warnings = self.compile(GrammarSource(**job))
        except GrammarRefused as error:
            return {"refused": [error.code, error.message, error.fix], "param": error.param, "reason": error.reason}
        except MemoryError:
            return {"failed": "memory"}
        except Exception as error:  # llguidance raises what it likes: all of it is this job's failure alone
            return {"failed": type(error).__name__}
        return {"text": text, "warnings": warnings}

    def compile(self, source: GrammarSource) -> tuple[str, list[str]]:
        """Return canonical text that is known to compile, and what is not enforced. Raises GrammarRefused."""
        warnings: list[str] = []
        text = canonical_text(source, self._output_format, warnings)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        warnings += matcher.get_grammar_warnings()
        _try_answer(matcher)
        if matcher.is_error():
            raise _refusal(matcher.get_error(), source)
        return text, list(dict.fromkeys(each[:300] for each in warnings))[:20]


def main() -> int:
    """Answer the jobs that come on stdin until it ends. The process's arguments are the bytes that compiling may take
    beside the tokenizer, and the seconds of processor time after which a single job ends the process."""
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    model = read_frame(jobs)
    if model is None:
        return 0
    compiler: Compiler | UnreadableVocabulary
    try:
        compiler = Compiler(model)
    except ValueError as error:
        compiler = UnreadableVocabulary(error_line(str(error))[:300])
    del model
    limit_process(_mapped_bytes() + memory_bytes)
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = compiler.run_job(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, answer)
    return 0


def _try_answer(matcher: LLMatcher) -> None:
    """Go through the beginning of an answer, which finds errors that come up only there."""
    for _ in range(_TRIED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            return
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask:
            return
        # The last token that is allowed: rarely one of a single character.
        matcher.try_consume_tokens([mask.bit_length() - 1])


def _unsupported(keyword: str, message: str) -> GrammarRefused:
    fix = "Leave it out, write it otherwise, or send the schema without strict."
    return GrammarRefused("UNSUPPORTED_KEYWORD", message, fix, param=keyword, reason="unsupported_keyword")


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES


def _refusal(message: str, source: GrammarSource) -> GrammarRefused:
    """Return the error for what llguidance says."""
    said = error_line(message)
    if found := re.search(r"Unimplemented keys: (\[.*?\])", message):
        first, *more = json.loads(found[1])
        return _unsupported(first, f"The keyword {', '.join([first, *more])} of the schema cannot be enforced.")
    if source.kind not in ("regex", "grammar"):
        for sign, keyword in _KEYWORDS.items():
            if sign in message:
                return _unsupported(keyword, f"The keyword {keyword} of the schema cannot be enforced: {said}.")
    if any(sign in message for sign in _TOO_COMPLEX):
        return too_large(f"The {source.kind} is too complex: {said}.", "Simplify it.")
    return bad_grammar(f"The {source.kind} cannot be compiled: {said}.", "Correct it.")


if __name__ == "__main__":
    sys.exit(main())
