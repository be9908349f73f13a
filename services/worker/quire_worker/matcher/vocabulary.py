"""`load_vocabulary` loads the model's tokenizer for llguidance, from tokenizer.json or a GGUF file.

llguidance needs the bytes of each token, and also the tokens of a text: where a grammar allows one text only, it forces
the tokens into which the model's own tokenizer splits this text.

`python -m quire_worker.matcher.vocabulary MODEL SIZE EOS...` tests whether the tokenizer can be read. If not, it prints
the cause and exits with 1. A worker runs this command before it advertises structured output.
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
    """Load the tokenizer of a model folder or GGUF file, for masks of `vocab_size` tokens. Raises ConfigError if no EOS
    token is below `vocab_size` or llguidance cannot read the tokenizer. Raises Unsupported for a kind of tokenizer in
    GGUF files that Quire does not have."""
    eos = [each for each in eos_token_ids if 0 <= each < vocab_size]
    if not eos:
        raise ConfigError(
            "NO_EOS_TOKEN",
            f"{model} names no EOS token, so that an answer with a grammar could not end.",
            "Add eos_token_id to its generation_config.json, or switch grammars off: --max-constrained-seqs 0.",
        )
    try:
        if is_gguf(model):
            text = read_tokenizer(open_gguf(model).metadata)[0].decode()
        else:
            text = (model / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "BAD_VOCABULARY",
            f"llguidance cannot read the tokenizer of {model}: {error}",
            "Correct its tokenizer.json, or switch grammars off: --max-constrained-seqs 0.",
        ) from error


def main(argv: Sequence[str]) -> int:
    """Test whether the tokenizer that the arguments name (model, size and EOS ids) can be loaded. Returns the exit
    code: 0, or 1 after printing the cause."""
    model, size, *eos = argv
    try:
        load_vocabulary(Path(model), int(size), [int(each) for each in eos])
    except QuireError as error:
        print(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
