"""This program compiles grammars in a process of its own. It reads sources from stdin, and writes canonical texts to
stdout, one at a time, as framed JSON.

Memory and processor time of the process are limited, so that a schema that takes too much of them fails alone.
llguidance does a part of its work with the first masks. So the process computes some masks before it answers.
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

from quire_common.children.frames import limit_process, read_frame, write_frame
from quire_tokenizer.grammar.canonical_text import ModelOutputFormat, canonical_text
from quire_tokenizer.grammar.grammar_source import GrammarRefused, GrammarSource, bad_grammar, too_large
from quire_tokenizer.grammar.json_schema import error_line

_PAGE_BYTES: Final = resource.getpagesize()
# Parts of llguidance's messages, and the keyword of a JSON schema that each is about.
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
_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')
_TOO_COMPLEX: Final = ("fuel", "too many", "too complex", "too large", "limit exceeded")


class UnreadableVocabulary:
    """Replaces the compiler for a model whose vocabulary llguidance cannot read, such as WordPiece."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return {"unreadable": ...} for every job."""
        return {"unreadable": self._reason}


class Compiler:
    """Compiles grammars for one model, which the first frame describes. Raises ValueError for a vocabulary that
    llguidance cannot read."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._tokenizer = LLTokenizer(model["tokenizer"], eos_token=model["eos"] or None)
        self._output_format = ModelOutputFormat(model["added"], model["tool_parser"], model["reasoning_parser"])

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile one source, given by the fields of a GrammarSource. Returns {"text": ..., "warnings": ...},
        {"refused": ...} with the error's code, message and fix (and "param" and "reason" beside it), or {"failed": ...}
        with "memory" if there is too little, else with the type of another error. Never raises."""
        try:
            text, warnings = self.compile(GrammarSource(**job))
        except GrammarRefused as error:
            return {"refused": [error.code, error.message, error.fix], "param": error.param, "reason": error.reason}
        except MemoryError:
            return {"failed": "memory"}
        except Exception as error:  # llguidance raises errors of many types; each fails this job alone
            return {"failed": type(error).__name__}
        return {"text": text, "warnings": warnings}

    def compile(self, source: GrammarSource) -> tuple[str, list[str]]:
        """Return canonical text that llguidance compiles, and warnings of what the text does not enforce: at most 20,
        none of them twice, each cut to 300 characters. Computes some masks too, since llguidance finds some errors only
        there. Raises GrammarRefused for a source that is bad or too large, and one that llguidance refuses."""
        warnings: list[str] = []
        text = canonical_text(source, self._output_format, warnings)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        warnings += matcher.get_grammar_warnings()
        _try_answer(matcher)
        if matcher.is_error():
            raise _refusal(matcher.get_error(), source)
        return text, list(dict.fromkeys(each[:300] for each in warnings))[:20]


def main() -> int:
    """Read the model's description from stdin, report that the process is ready, and answer jobs until stdin ends.
    Command-line arguments: the bytes of memory for compiling, in addition to the tokenizer's, and the seconds of
    processor time after which a job ends the process. If llguidance cannot read the vocabulary, each answer says so."""
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    model = read_frame(jobs)
    if model is None:
        return 0
    compiler: Compiler | UnreadableVocabulary
    try:
        compiler = Compiler(model.message)
    except ValueError as error:
        compiler = UnreadableVocabulary(error_line(str(error))[:300])
    del model
    limit_process(_mapped_bytes() + memory_bytes)
    write_frame(answers, {"ready": True})
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = compiler.run_job(job.message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, answer)
    return 0


def _try_answer(matcher: LLMatcher) -> None:
    """Compute the masks of up to _TRIED_TOKENS tokens of an answer, since some errors come up only there. Each time,
    the allowed token with the highest id is taken. Errors stay in the matcher."""
    for _ in range(_TRIED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            return
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask:
            return
        # The allowed token with the highest id: rarely a single character.
        matcher.try_consume_tokens([mask.bit_length() - 1])


def _unsupported(keyword: str, message: str) -> GrammarRefused:
    fix = "Leave it out, write it otherwise, or send the schema without strict."
    return GrammarRefused("UNSUPPORTED_KEYWORD", message, fix, param=keyword, reason="unsupported_keyword")


def _mapped_bytes() -> int:
    """Return the bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES


def _refusal(message: str, source: GrammarSource) -> GrammarRefused:
    """Return the error for a source that llguidance refuses with this message. The code is UNSUPPORTED_KEYWORD for a
    keyword of a schema that cannot be enforced, GRAMMAR_TOO_LARGE for a source that is too complex, and BAD_GRAMMAR for
    all others. The error's text quotes the message or names the keywords."""
    said = error_line(message)
    if found := re.search(r"Unimplemented keys: (\[.*?\])", message):
        first, *more = json.loads(found[1])
        return _unsupported(first, f"The keyword {', '.join([first, *more])} of the schema cannot be enforced.")
    if source.kind not in ("regex", "grammar"):
        for sign, keyword in _KEYWORDS.items():
            if sign in message:
                return _unsupported(keyword, f"The keyword {keyword} of the schema cannot be enforced: {said}.")
    plain = _QUOTED.sub("", said)  # what the message quotes of the source says nothing of the error
    if any(sign in plain for sign in _TOO_COMPLEX):
        return too_large(f"The {source.kind} is too complex: {said}.", "Simplify it.")
    return bad_grammar(f"The {source.kind} cannot be compiled: {said}.", "Correct it.")


if __name__ == "__main__":
    sys.exit(main())
