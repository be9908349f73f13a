"""Reads generation_config.json, as vLLM does: end-of-sequence ids, and the model's own defaults of sampling parameters.

The table of request parameters says which parameters these are, and has their bounds.
"""

from __future__ import annotations

from pathlib import Path

from quire_common.config import parse_object
from quire_common.errors import ConfigError
from quire_common.request_parameters import MODEL_DEFAULTS, Parameter
from quire_worker.model.config_file import ConfigFile, read_json

NAME = "generation_config.json"
AUTO, WITHOUT = "auto", "vllm"
_FILE, _OVERRIDE = "generation_config", "override_generation_config"
_FIXES = {
    _FILE: "Correct it, or give --generation-config vllm, which reads no defaults from the model.",
    _OVERRIDE: "Correct it, or leave it out.",
}


def generation_config(folder: Path) -> ConfigFile:
    """Return the fields of a folder's generation_config.json; a config without fields if there is no such file. Raises
    ConfigError if the file cannot be read or is no JSON object."""
    file = folder / NAME
    return ConfigFile(read_json(file) if file.is_file() else {}, str(file))


def sampling_defaults(model: Path, source: str = AUTO, override: str = "") -> tuple[tuple[str, float], ...]:
    """Return the model's defaults of sampling parameters as (parameter's name, value) pairs. `source` is auto (the
    model's own folder), vllm (no file is read) or another folder, which must have the file. `override` is a JSON object
    whose fields take precedence. A null field counts as absent, and does not remove a value. With auto, a missing file
    gives no defaults.

    Raises ConfigError for a missing file in another folder, a malformed file or `override`, a value that is not a
    number within its bounds, and an unknown field of `override`.
    """
    found: dict[str, float] = {}
    if source != WITHOUT:
        folder = model if source == AUTO else Path(source)
        if source != AUTO and not (folder / NAME).is_file():
            raise ConfigError(
                "GENERATION_CONFIG_MISSING",
                f"There is no {folder / NAME}.",
                "Give auto, vllm or a folder with this file.",
                param=_FILE,
            )
        found |= _defaults(generation_config(folder), _FILE)
    if override:
        option = "--override-generation-config"
        fields = parse_object(override, option)
        known = [each.generation_config for each in MODEL_DEFAULTS]
        if unknown := sorted(set(fields) - set(known)):
            raise ConfigError(
                "BAD_GENERATION_CONFIG",
                f"{option} has {unknown[0][:80]!r}, which is not a default of a request.",
                f"Known fields: {', '.join(known)}.",
                param=_OVERRIDE,
            )
        found |= _defaults(ConfigFile(fields, option), _OVERRIDE)
    return tuple(found.items())


def _defaults(config: ConfigFile, param: str) -> dict[str, float]:
    present = (each for each in MODEL_DEFAULTS if config.has(each.generation_config))
    return {each.name: _number(config, each, param) for each in present}


def _number(config: ConfigFile, parameter: Parameter, param: str) -> float:
    """Return the value of a field that is present: an integer for an int parameter, where 2.0 counts as 2, else a
    float. Raises ConfigError, which names the option `param`, if it is no such number or outside the parameter's
    bounds."""
    value = config.fields[parameter.generation_config]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if parameter.kind == "int" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        not is_number
        or not parameter.low <= value <= parameter.high
        or (parameter.above_low and value == parameter.low)
        or (parameter.kind == "int" and not isinstance(value, int))
    ):
        kind = "an integer" if parameter.kind == "int" else "a number"
        low = f"above {parameter.low:g}" if parameter.above_low else f"of at least {parameter.low:g}"
        raise ConfigError(
            "BAD_GENERATION_CONFIG",
            f"{config.source}: `{parameter.generation_config}` is {value!r:.80}, not {kind} {low} and at most "
            f"{parameter.high:g}.",
            _FIXES[param],
            param=param,
        )
    return value if parameter.kind == "int" else float(value)
