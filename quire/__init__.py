"""Quire's public package, which users import. Names load at their first use, so that `import quire` takes no time.

The package knows the contracts (quire.v1) and the command line. It must not import the services, which are other
processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_client import AsyncClient
    from quire.beam_search import BeamSearchOutput, BeamSearchSequence
    from quire.client import Client
    from quire.errors import (
        Aborted,
        DeadlineExceeded,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        NotFound,
        Overloaded,
        PermissionDenied,
        QuireError,
        StartFailed,
        Unauthenticated,
        Unavailable,
        Unsupported,
    )
    from quire.llm import LLM
    from quire.outputs import (
        CompletionOutput,
        Delta,
        HopTiming,
        Logprob,
        ModelCard,
        RequestOutput,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from quire.prompts import ChatPrompt
    from quire.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "async_client",
    "ChatPrompt": "prompts",
    "Client": "client",
    "LLM": "llm",
    **dict.fromkeys(
        ("BeamSearchParams", "RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams"),
        "sampling_params",
    ),
    **dict.fromkeys(("BeamSearchOutput", "BeamSearchSequence"), "beam_search"),
    **dict.fromkeys(
        (
            "CompletionOutput",
            "Delta",
            "HopTiming",
            "Logprob",
            "ModelCard",
            "RequestOutput",
            "ToolCall",
            "ToolCallDelta",
            "Usage",
        ),
        "outputs",
    ),
    **dict.fromkeys(
        (
            "Aborted",
            "DeadlineExceeded",
            "FailedPrecondition",
            "Internal",
            "InvalidArgument",
            "NotFound",
            "Overloaded",
            "PermissionDenied",
            "QuireError",
            "StartFailed",
            "Unauthenticated",
            "Unavailable",
            "Unsupported",
        ),
        "errors",
    ),
}

__all__ = [
    "LLM",
    "Aborted",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatPrompt",
    "Client",
    "CompletionOutput",
    "DeadlineExceeded",
    "Delta",
    "FailedPrecondition",
    "HopTiming",
    "Internal",
    "InvalidArgument",
    "Logprob",
    "ModelCard",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StartFailed",
    "StructuredOutputsParams",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quire.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
