"""MatcherSetup: the settings that the engine sends to its matcher's process, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MatcherSetup:
    """The model's tokens, and the shape of the ring."""

    model: str
    """Path of the model's folder or GGUF file."""
    vocab_size: int
    """The width of masks: the model's, padding included."""
    eos_token_ids: tuple[int, ...]
    mask_slots: int
    entries_per_slot: int
    """Masks for each seat."""
    process: int = 0
    """Which of the matcher's processes it is."""
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
