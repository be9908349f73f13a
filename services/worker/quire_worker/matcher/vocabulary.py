"""The model's tokenizer as llguidance takes it, from tokenizer.json or a GGUF file.

Masks need the bytes of tokens, and the tokens of texts too: where a grammar leaves one text only, its tokens are those
that the model's own tokenizer makes of it.

`python -m quire_worker.matcher.vocabulary MODEL SIZE EOS...` says by its exit code whether the tokenizer can be read,
and if not prints why. A worker asks before it says that it applies grammars.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from quire_common.errors import ConfigError, QuireError
from quire_common.gguf import is_gguf, open_gguf
from quire_common.gguf.tokenizer.tokenizer_json import read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the tokenizer of a model folder or GGUF file, for masks of `vocab_size` tokens. Raises ConfigError, or
    Unsupported for a GGUF file of an unknown kind."""
    eos = [each for each in eos_token_ids if 0 <= each < vocab_size]
    if not eos:
        raise ConfigError(
            "NO_EOS_TOKEN",
            f"{model} names no token that ends an answer, and a grammar's answer could not end.",
            "Name one in its generation_config.json (eos_token_id), or switch grammars off: --max-constrained-seqs 0.",
        )
    try:
        if is_gguf(model):
            text = read_tokenizer(open_gguf(model).metadata)[0].decode()
        else:
            text = (model / "tokenizer.json").read_text()
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "BAD_VOCABULARY",
            f"The tokenizer of {model} cannot be read for grammars: {error}",
            "Mend its tokenizer.json, or switch grammars off: --max-constrained-seqs 0.",
        ) from error


def main(argv: Sequence[str]) -> int:
    """Read the tokenizer that the arguments name. Returns the exit code."""
    model, size, *eos = argv
    try:
        load_vocabulary(Path(model), int(size), [int(each) for each in eos])
    except QuireError as error:
        print(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
