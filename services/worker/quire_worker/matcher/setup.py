"""MatcherSetup: the configuration that the engine sends to the matcher's process, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MatcherSetup:
    """The model's tokenizer, the shape of the mask ring, and logging."""

    model: str
    """The path of the model's folder or GGUF file."""
    vocab_size: int
    """The number of tokens in a mask: the rows of the model's output matrix, padding included."""
    eos_token_ids: tuple[int, ...]
    mask_slots: int
    entries_per_slot: int
    """The number of masks for which a mask slot has room."""
    process: int
    """The index of the process among the matcher's processes."""
    grammar_bytes: int
    """The address space that grammars may take, besides what the process has mapped when it is ready."""
    instance: str = ""
    log_level: str = "info"
    log_format: str = "json"

    def to_json(self) -> bytes:
        """Pack as the payload of a SETUP frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> MatcherSetup:
        """Unpack the payload of a SETUP frame."""
        values = json.loads(data)
        return cls(**values | {"eos_token_ids": tuple(values["eos_token_ids"])})
