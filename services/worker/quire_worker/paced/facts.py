"""PacedFacts: the facts of the made-up model (sizes, end tokens), by default or from the JSON files of a model
folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from quire_common.errors import ConfigError
from quire_worker.model.config_facts import CONTEXT, context_length, eos_token_ids
from quire_worker.model.config_file import ConfigFile, read_json
from quire_worker.model.text_part import text_part

ARCHITECTURE = "PacedForCausalLM"


@dataclass(frozen=True, slots=True)
class PacedFacts:
    """All values that the tokens depend on, apart from the sequence itself."""

    vocab_size: int = 32_000
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = 32_768

    @property
    def digest(self) -> bytes:
        """Return a digest of 16 bytes of all facts that change tokens. Replicas with the same digest give the same
        answers. The digest leaves out the context length, which changes no token."""
        canonical = json.dumps([ARCHITECTURE, self.vocab_size, self.eos_token_ids])
        return hashlib.sha256(canonical.encode()).digest()[:16]


DEFAULT_FACTS = PacedFacts()


def read_facts(folder: str, max_model_len: int = 0) -> PacedFacts:
    """Read the facts from a model folder's JSON files, without weights; an empty path gives the defaults.
    `max_model_len` 0: the model's own, or the default. Raises ConfigError if the folder has no config.json, a field is
    missing or wrong, or `max_model_len` exceeds the model's or the default context. Raises Unsupported for a multimodal
    model whose class or config is not supported."""
    if not folder:
        config = ConfigFile({CONTEXT: DEFAULT_FACTS.max_model_len})
        return replace(DEFAULT_FACTS, max_model_len=context_length(config, max_model_len))
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no {file}.",
            "Give a Hugging Face folder with --model, or leave it out.",
            param="model",
        )
    config = ConfigFile(read_json(file), str(file))
    part = text_part(config, {})
    config = config if part is None else part.config
    eos = eos_token_ids(Path(folder), config)
    return PacedFacts(config.integer("vocab_size"), eos, context_length(config, max_model_len))
