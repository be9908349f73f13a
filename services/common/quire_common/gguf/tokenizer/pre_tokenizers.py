"""Pre-tokenizers, which split texts into words before merges apply, by the name in `tokenizer.ggml.pre`.

Each entry is data: the steps in the form of tokenizer.json, and the defaults that llama.cpp attaches to the name. The
steps are those of the models' own tokenizer.json; llama.cpp's expressions are equivalent. An unknown name is refused,
because wrong words would give wrong tokens without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire_common.errors import Unsupported
from quire_common.gguf import Metadata

Step = dict[str, Any]
PRE_TOKENIZER_NAME: Final = "tokenizer.ggml.pre"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The pre-tokenizer of one `tokenizer.ggml.pre` name, and the defaults that llama.cpp attaches to that name."""

    steps: tuple[Step, ...]
    normalizer: Step | None = None
    ignore_merges: bool = False
    """A word that is in the vocabulary becomes that token, without merges."""
    adds_bos: bool = False
    """Whether bos begins a text, where the file does not say."""


def _byte_level(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _split(*patterns: str) -> tuple[Step, ...]:
    """Words by one pattern after the other, then bytes."""
    return *(_words(pattern) for pattern in patterns), _byte_level(use_regex=False)


# Templates of regular expressions. Models differ in how many digits make a word, and in which words keep contractions.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Line breaks never end a word of marks, unlike in _WORD_PATTERN.
_SEED_CODER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words end at spaces and at marks that end sentences, in Latin, Chinese, Hindi, Arabic and Urdu.
_BLOOM_PATTERN = r" ?[^(\s|[.,!?…。，、।۔،])]+"
# Ideographs and kana stand apart, before words are split. A mark joins the letters of ASCII behind it.
_HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKED_WORD_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer((_byte_level(use_regex=True),))
_DIGIT_BY_DIGIT = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_LLAMA3 = PreTokenizer(_split(_WORD_PATTERN % r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_LLAMA3_SPLIT_ONLY = PreTokenizer(_split(_WORD_PATTERN % r"\p{N}{1,3}"))
_QWEN2_SPLIT_ONLY = PreTokenizer(_split(_WORD_PATTERN % r"\p{N}"))
_QWEN2 = PreTokenizer(_split(_WORD_PATTERN % r"\p{N}"), normalizer={"type": "NFC"})
_TEKKEN = PreTokenizer(_split(_CASED_WORD_PATTERN % ("", "", "")), ignore_merges=True, adds_bos=True)
_FALCON = PreTokenizer(
    (
        {"type": "Punctuation", "behavior": "Contiguous"},
        _byte_level(use_regex=True),
        {"type": "Digits", "individual_digits": False},
        _words("[0-9][0-9][0-9]"),
    )
)
_BLOOM = PreTokenizer(_split(_BLOOM_PATTERN))
_SEED_CODER = PreTokenizer(_split(_SEED_CODER_PATTERN))
_DEEPSEEK3 = PreTokenizer(_split(r"\p{N}{1,3}", _HAN_OR_KANA, _MARKED_WORD_PATTERN))
_GPT4O = PreTokenizer(_split(_CASED_WORD_PATTERN % (_CONTRACTION, _CONTRACTION, "{1,3}")))

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _GPT2),
        **dict.fromkeys(
            ("smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b", "exaone"), _DIGIT_BY_DIGIT
        ),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_SPLIT_ONLY),
        "qwen2": _QWEN2,
        **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan"), _QWEN2_SPLIT_ONLY),
        "tekken": _TEKKEN,
        **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
        **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM),
        **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _DEEPSEEK3),
        "falcon": _FALCON,
        "seed-coder": _SEED_CODER,
    }
)


def find_pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """Return the entry of PRE_TOKENIZERS that the file names. Raises Unsupported if the file names none, or an unknown
    one; ConfigError if the name is no text."""
    name = metadata.text(PRE_TOKENIZER_NAME, "")
    if name not in PRE_TOKENIZERS:
        said = f"names the pre-tokenizer {name[:80]!r}" if name else f"names no pre-tokenizer (`{PRE_TOKENIZER_NAME}`)"
        raise Unsupported(
            "UNSUPPORTED_PRE_TOKENIZER",
            f"{metadata.path} {said}, which is not supported. Supported: {', '.join(PRE_TOKENIZERS)}.",
            "Convert the model with a current llama.cpp, or name a folder with tokenizer.json by --tokenizer.",
            param="model",
        )
    return PRE_TOKENIZERS[name]
