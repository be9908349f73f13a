"""`find_model` finds the class in transformers that a config.json names, and refuses models that the Transformers
backend cannot run.

This file looks at the config and the class alone; the probe looks at the modules.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from quire_common.errors import ConfigError, QuireError, Unsupported
from quire_worker.model.config_facts import CONTEXT
from quire_worker.model.config_file import ConfigFile

SUPPORTED_RELEASES: Final = "transformers>=5.23,<5.24"
"""The releases of transformers for which this backend was written."""
# A config.json could choose code, or another way to load weights, by these fields.
_IGNORED_FIELDS: Final = (
    "auto_map", "attn_implementation", "distributed_config", "dtype", "experts_implementation", "fusion_config",
    "quantization_config", "torch_dtype", "transformers_weights",
)  # fmt: skip  # a list of names
_ATTENTION_LAYERS: Final = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
_FIX: Final = "Serve another model."


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A causal model of transformers: its class, and the config for it."""

    architecture: str
    model_class: Any
    config: Any
    version: str
    """The release of transformers."""

    def build(self, attention: str, experts: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Make the model with random weights, on the current device. `experts` is the implementation of a mixture of
        experts; None: transformers chooses."""
        config = copy.deepcopy(self.config)
        choice = {} if experts is None else {"experts_implementation": experts}
        return self.model_class._from_config(config, attn_implementation=attention, dtype=dtype, **choice).eval()

    def with_context(self, file: ConfigFile) -> ConfigFile:
        """Return the config.json with the model's context length under its usual name, if transformers knows it."""
        positions = getattr(self.config, CONTEXT, None)
        return file if positions is None else replace(file, fields={**file.fields, CONTEXT: positions})


def find_model(file: ConfigFile) -> FoundModel:
    """Return the model that a config.json names. Raises Unsupported if transformers has no such causal model, or if
    Quire's pages cannot hold the state that it keeps of a sequence. Raises ConfigError if its config is invalid, or if
    transformers is not installed."""
    transformers = _import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wanted = file.texts("architectures")
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architecture = next((name for name in wanted if name in known), None)
    if architecture is None:
        raise _unknown_architecture(file, wanted, transformers.__version__)
    model_class = getattr(transformers, architecture)
    config = _make_config(file, model_class.config_class)
    _check_sequence_state(architecture, model_class, config)
    return FoundModel(architecture, model_class, config, transformers.__version__)


def _import_transformers() -> Any:
    """Import transformers and return it, with its warnings and progress bars off. Raises ConfigError if it is not
    installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "TRANSFORMERS_MISSING",
            "This model needs the package transformers, which is not installed.",
            f"Run `pip install '{SUPPORTED_RELEASES}'`.",
            param="model_impl",
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers'
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'
    return transformers


def _unknown_architecture(file: ConfigFile, wanted: tuple[str, ...], version: str) -> QuireError:
    """Make the error for a config.json whose architecture is no causal model of transformers: REMOTE_CODE if the folder
    brings its own code, else UNSUPPORTED_ARCHITECTURE."""
    asked = ", ".join(wanted) if wanted else f"none (model_type {file.text('model_type', 'absent')})"
    if file.has("auto_map"):
        return Unsupported(
            "REMOTE_CODE",
            f"{file.source} names the architecture {asked}, whose code is in the model's folder (`auto_map`). Quire "
            "never runs code of a folder.",
            "Serve a model whose architecture is in transformers itself.",
            param="model",
        )
    return Unsupported(
        "UNSUPPORTED_ARCHITECTURE",
        f"{file.source} names the architecture {asked}, which is no causal model of Quire or "
        f"of transformers {version}.",
        _FIX,
        param="model",
    )


def _make_config(file: ConfigFile, config_class: Any) -> Any:
    """Make transformers' config from config.json. Fields that could choose code or another way to load weights are left
    out, and so are names with a leading underscore. Raises ConfigError for another `model_type`, or if transformers
    refuses a field."""
    if file.text("model_type", config_class.model_type) != config_class.model_type:
        raise file.bad("model_type", f"{config_class.model_type}, as `architectures` implies")
    fields = {
        name: value for name, value in file.fields.items() if name not in _IGNORED_FIELDS and not name.startswith("_")
    }
    try:
        return config_class.from_dict(fields)
    except Exception as error:  # transformers checks fields by errors of many types
        raise ConfigError(
            "BAD_CONFIG",
            f"transformers refuses {file.source}: {str(error)[:300]}",
            "Use the config.json of the model's own revision.",
        ) from error


def _check_sequence_state(architecture: str, model_class: Any, config: Any) -> None:
    """Raise Unsupported for a model whose state of a sequence is not just keys and values: one with an encoder, a
    vision or audio part, its own cache class, or recurrent or other layers."""
    if config.is_encoder_decoder:
        raise unsupported_model(
            "UNSUPPORTED_ARCHITECTURE", architecture, "it has an encoder, whose states Quire does not keep"
        )
    parts = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if parts:
        raise unsupported_model(
            "UNSUPPORTED_ARCHITECTURE", architecture, f"its config has `{parts[0]}`: Quire serves text only"
        )
    own = _own_caches(sys.modules[model_class.__module__])
    if own:
        raise unsupported_model("UNSUPPORTED_CACHE", architecture, f"it brings its own cache class, {own[0]}")
    layers = sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENTION_LAYERS)
    if layers or model_class._is_stateful:
        kind = f"layers of the type {layers[0]}" if layers else "recurrent layers"
        raise unsupported_model(
            "UNSUPPORTED_LAYER_TYPE", architecture, f"it has {kind}, whose state is no key or value"
        )


def check_rope(found: FoundModel, max_model_len: int) -> None:
    """Raise Unsupported if sequences may exceed the model's original context, and its RoPE has the type longrope: the
    rotation of a row then depends on the longest sequence of the step."""
    ropes = getattr(found.config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        original = rope.get("original_max_position_embeddings") or max_model_len
        if rope.get("rope_type") == "longrope" and max_model_len > original:
            raise unsupported_model(
                "UNSUPPORTED_ROPE",
                found.architecture,
                f"keys of its rotary embedding (longrope) change where a sequence exceeds {original} tokens",
                f"Give --max-model-len {original}.",
            )


def _own_caches(module: Any) -> list[str]:
    """Return the names of the cache classes that a module of modelling code defines."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    return [
        name
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, Cache | CacheLayerMixin) and found.__module__ == module.__name__
    ]


def unsupported_model(code: str, architecture: str, reason: str, fix: str = _FIX) -> Unsupported:
    """Return the error, with this code, for a model that transformers has and the Transformers backend cannot run. Its
    text says the `reason`."""
    return Unsupported(
        code,
        f"The Transformers backend cannot run {architecture}: {reason}.",
        fix,
        param="model",
    )


@contextlib.contextmanager
def failures_as_unsupported(code: str, architecture: str) -> Iterator[None]:
    """In this context, Unsupported replaces whatever the modelling code raises. Two kinds of errors pass unchanged:
    Quire's own, and those of a GPU without enough memory, since they say nothing about the code."""
    try:
        yield
    except (QuireError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause = f"its code does not run with Quire's attention ({type(error).__name__}: {str(error)[:200]})"
        raise unsupported_model(code, architecture, cause) from error
