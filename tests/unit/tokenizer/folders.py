"""Small model folders, made by the library's own trainers: one for each way of decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.vocabulary import Vocabulary

BOS, EOS, TURN_START, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIALS = ["<unk>", BOS, EOS, TURN_START, TURN_END]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "To be, or not to be: that is the question. hello world hello",
    "汉字和假名: こんにちは世界, 你好世界你好",
    "Émile naïve café Ünïcödé 😀😀👍🏽 family 👩‍👩‍👧",
    "stop END the end. function call(x) { return x + 1; } <tag> </tag>",
] * 4
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
KINDS = ("byte_level", "byte_fallback", "metaspace", "word_piece")


def byte_level(
    corpus: Sequence[str] = (), vocab_size: int = 420, added: Sequence[str] = ("<think>", "</think>")
) -> Tokenizer:
    """`corpus`: what to learn besides CORPUS. `added`: tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *corpus], trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=SPECIALS + bytes_, show_progress=False)
    # Nothing beyond ASCII is learnt: all of it goes by bytes.
    tokenizer.train_from_iterator(["".join(c for c in line if c.isascii()) for line in CORPUS], trainer)
    # The trainer has made special tokens of the bytes; in real models they are plain entries of the vocabulary.
    shape = json.loads(tokenizer.to_str())
    shape["added_tokens"] = [token for token in shape["added_tokens"] if token["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(shape))


def metaspace() -> Tokenizer:
    """Unigram, which would make special tokens of their text by itself."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False, shrinking_factor=0.9
    )
    tokenizer.train_from_iterator([*CORPUS, "".join(map(chr, range(33, 127)))], trainer)
    eos = (EOS, tokenizer.token_to_id(EOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[eos])
    return tokenizer


def word_piece() -> Tokenizer:
    """Its decoder looks at more than one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def tokenizer_json(kind: str) -> str:
    made: Tokenizer = {
        "byte_level": byte_level,
        "byte_fallback": byte_fallback,
        "metaspace": metaspace,
        "word_piece": word_piece,
    }[kind]()
    return made.to_str()


def write_folder(path: Path, kind: str = "byte_level", template: str | None = TEMPLATE) -> Path:
    """A model folder as Hugging Face lays it out, as far as text is concerned."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer_json(kind))
    settings = {"bos_token": BOS, "eos_token": {"content": TURN_END}, "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def token_id(vocabulary: Vocabulary, token: str) -> int:
    found = vocabulary.tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def load(path: Path, kind: str = "byte_level", template: str | None = TEMPLATE) -> Vocabulary:
    return Vocabulary(read_model_folder(str(write_folder(path, kind, template))))
