"""Reads the config fields that all architectures share: the end-of-sequence tokens and the context length.

Real models and the paced worker's model both use this module, so that they agree. It knows nothing of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import MAX_I32
from quire_common.errors import ConfigError
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.generation_config import generation_config

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = "max_position_embeddings"


def eos_token_ids(folder: Path, config: ConfigFile) -> tuple[int, ...]:
    """Return the end-of-sequence token ids of config.json and, if it exists, of generation_config.json: the union,
    sorted. Raises ConfigError if a file is malformed."""
    return tuple(sorted({*config.token_ids("eos_token_id"), *generation_config(folder).token_ids("eos_token_id")}))


def context_length(config: ConfigFile, asked: int) -> int:
    """Return the greatest number of tokens of a sequence: `asked` or, if that is 0, the model's context. Raises
    ConfigError if `asked` exceeds the model's context, or if the context counts and exceeds int32."""
    positions = config.positions(CONTEXT)
    if asked > positions:
        raise ConfigError(
            "MAX_MODEL_LEN_TOO_LARGE",
            f"--max-model-len {asked} exceeds the model's context of {positions}.",
            f"Use at most {positions}.",
            param="max_model_len",
        )
    if not asked and positions > MAX_I32:
        raise config.bad(
            CONTEXT, f"at most {MAX_I32}", fix="Give the longest sequence that you need with --max-model-len."
        )
    return asked or positions
