"""PacedFacts: what the made-up model says of itself, by default or from a model folder's JSON files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import ConfigError
from quire_worker.model.config_file import ConfigFile, read_json

ARCHITECTURE = "PacedForCausalLM"


@dataclass(frozen=True, slots=True)
class PacedFacts:
    """All that tokens depend on beside the sequence itself."""

    vocab_size: int = 32_000
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = 32_768

    @property
    def digest(self) -> bytes:
        """Digest of all facts that change tokens; replicas with the same digest give the same answers. The context
        length changes no token and is left out."""
        canonical = json.dumps([ARCHITECTURE, self.vocab_size, self.eos_token_ids])
        return hashlib.sha256(canonical.encode()).digest()[:16]


DEFAULT_FACTS = PacedFacts()


def read_facts(folder: str, max_model_len: int = 0) -> PacedFacts:
    """Read the facts from a model folder's JSON files, without weights; an empty path gives the defaults.
    `max_model_len` 0: the model's own. Raises ConfigError if the folder has no config.json or a context shorter than
    `max_model_len`."""
    facts = _of_folder(Path(folder)) if folder else DEFAULT_FACTS
    if max_model_len > facts.max_model_len:
        raise ConfigError(
            "MAX_MODEL_LEN_TOO_LARGE",
            f"--max-model-len {max_model_len} exceeds the model's context of {facts.max_model_len}.",
            f"Use at most {facts.max_model_len}.",
            param="max_model_len",
        )
    return PacedFacts(facts.vocab_size, facts.eos_token_ids, max_model_len or facts.max_model_len)


def _of_folder(folder: Path) -> PacedFacts:
    """Read vocabulary, context length and end-of-sequence ids from config.json and, if present, generation_config.json.
    Raises ConfigError MODEL_NOT_FOUND without a config.json."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no {file}.",
            "Give a Hugging Face folder with --model, or leave it out.",
            param="model",
        )
    config = ConfigFile(read_json(file), str(file))
    eos = set(config.token_ids("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos |= set(ConfigFile(read_json(generation), str(generation)).token_ids("eos_token_id"))
    return PacedFacts(config.integer("vocab_size"), tuple(sorted(eos)), config.integer("max_position_embeddings"))
