"""The demo model's tokenizer: a byte-level BPE of 4096 entries, its special tokens and its chat template.

The module also has `Segmenter`, which cuts text as the tokenizer does or, for training, at random into smaller pieces
(BPE dropout). The tokenizers library also has dropout, but not from a seed, and training runs must be repeatable.
"""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (BOS, EOS, PAD, TURN_START, TURN_END)
# Parsers of tool calls and reasoning read these in the answer's text, so decoding must not drop them as "special".
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
)
RESERVED_TOKENS = tuple(f"<|reserved_{index}|>" for index in range(32 - len(CONTROL_TOKENS) - len(MARKUP_TOKENS)))

# Contractions, words with their leading space, single digits, punctuation with the line breaks after it, blank runs.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part.text is defined -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set has_system = messages and messages[0].role in ["system", "developer"] -%}
{%- if has_system or tools -%}
  {{- "<|im_start|>system\\n" -}}
  {%- if has_system -%}{{- text_of(messages[0].content) -}}{%- endif -%}
  {%- if tools -%}
    {%- if has_system -%}{{- "\\n\\n" -}}{%- endif -%}
    {{- "You may call these tools:\\n<tools>\\n" -}}
    {%- for tool in tools -%}{{- tool | tojson -}}{{- "\\n" -}}{%- endfor -%}
    {{- "</tools>\\nTo call one, answer with\\n<tool_call>\\n" -}}
    {{- '{"name": "the tool\\'s name", "arguments": {}}' -}}
    {{- "\\n</tool_call>" -}}
  {%- endif -%}
  {{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and has_system -%}
  {%- elif message.role == "tool" -%}
    {{- "<|im_start|>tool\\n<tool_response>\\n" -}}{{- text_of(message.content) -}}
    {{- "\\n</tool_response><|im_end|>\\n" -}}
  {%- elif message.role == "assistant" -%}
    {{- "<|im_start|>assistant\\n" -}}
    {%- if message.reasoning_content is defined and message.reasoning_content -%}
      {{- "<think>\\n" -}}{{- message.reasoning_content -}}{{- "\\n</think>\\n\\n" -}}
    {%- endif -%}
    {{- text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- if not loop.first or message.content -%}{{- "\\n" -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
      {%- if function.arguments is string -%}{{- function.arguments -}}
      {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
      {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
  {%- else -%}
    {{- "<|im_start|>" -}}{{- message.role -}}{{- "\\n" -}}{{- text_of(message.content) -}}{{- "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def train_tokenizer(text: str) -> Tokenizer:
    """Learn exactly VOCAB_SIZE entries from the training text alone, so that held-out figures stay honest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*CONTROL_TOKENS, *MARKUP_TOKENS, *RESERVED_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}: it is too small")
    bos = (BOS, token_id(tokenizer, BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[bos]
    )
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    return Tokenizer.from_str(json.dumps(written, ensure_ascii=False))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


class Segmenter:
    """Converts text to token ids, optionally with a random, finer segmentation of words.

    Each word is cut once as the tokenizer does, and `variants` times with random merges left out. A noisy encoding
    picks one of these for each occurrence. So the model sees the pieces of a rare word in more contexts.
    """

    def __init__(self, tokenizer: Tokenizer, drop: float, variants: int, rng: np.random.Generator) -> None:
        written = json.loads(tokenizer.to_str())["model"]
        self._vocab: dict[str, int] = written["vocab"]
        pairs = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in written["merges"]]
        self._ranks: dict[tuple[str, str], int] = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self._tokenizer, self._drop, self._variants, self._rng = tokenizer, drop, variants, rng
        self._words: dict[str, list[list[int]]] = {}

    def encode(self, text: str, noisy: bool) -> list[int]:
        """Return the token ids of plain text. Markup in the text is ordinary text."""
        ids: list[int] = []
        for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text):
            cuts = self._words.get(word)
            if cuts is None:
                cuts = [self._cut(word, 0.0), *(self._cut(word, self._drop) for _ in range(self._variants))]
                self._words[word] = cuts
            ids.extend(cuts[self._rng.integers(1, len(cuts))] if noisy else cuts[0])
        return ids

    def _cut(self, word: str, drop: float) -> list[int]:
        """Merge byte pairs, lowest rank first. Each candidate is skipped with probability `drop`."""
        pieces = list(word)
        while len(pieces) > 1:
            best: tuple[int, int] | None = None
            for index in range(len(pieces) - 1):
                rank = self._ranks.get((pieces[index], pieces[index + 1]))
                if rank is None or (best is not None and rank >= best[0]):
                    continue
                if drop == 0.0 or self._rng.random() >= drop:
                    best = (rank, index)
            if best is None:
                break
            pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]
        return [self._vocab[piece] for piece in pieces]
