"""Configuration: one frozen dataclass per service, filled from flags, environment and a YAML file.

Precedence: flag > `QUIRE_<SERVICE>_<FIELD>` > `--config` file > default. An unknown key or a bad value is fatal and
named. Field types: str, int, float, bool, tuple[str, ...] (comma separated), and `X | None`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from quire_common.errors import ConfigError
from quire_common.version import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

C = TypeVar("C")
ENV_PREFIX = "QUIRE_"
# In a URL, what precedes a password, and the password: user:password@host, or ?password=.
_URL_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/\s]*(?=@)|([?&]password=)[^&\s]*")

# The greatest value where an option names none, by the unit that its name ends with: what timers, polls, Redis and the
# columns of messages hold. Counts are int32.
_MOST_BY_UNIT = {"_bytes": 2**50, "_ms": 2**31 - 1, "_s": 30 * 86_400}
_MOST_COUNT = 2**31 - 1
_MOST_YAML_DEPTH = 100
# The names that sections of a file may have.
_SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")

_yaml_loader: Callable[[str], Any] = yaml.SafeLoader
try:
    from yaml._yaml import CParser
except ImportError:  # a build of PyYAML without libyaml
    pass
else:

    class _LibyamlLoader(Composer, CParser, SafeConstructor, Resolver):
        """SafeLoader with libyaml's parser, which takes less than half of the time. The composer is the one in Python,
        which raises RecursionError for deep lists. The composer of yaml.CSafeLoader would overflow the C stack."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    _yaml_loader = _LibyamlLoader


def option(
    default: Any,
    help_text: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    secret: bool = False,
    file_of: str = "",
) -> Any:
    """Return a dataclass field with the default and what its flag needs: help, choices and inclusive bounds. A secret
    is one or several texts, and is masked where values are shown and in errors. `file_of` names another field: this one
    is then the path of a file with that field's value, so that it need not be on the command line."""
    metadata = {
        "help": help_text,
        "choices": choices,
        "min": at_least,
        "max": at_most,
        "secret": secret,
        "file_of": file_of,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """What every service takes."""

    listen: str = option("127.0.0.1:0", "address of the gRPC server; port 0 picks a free one")
    advertise: str = option("", "host:port under which peers reach this service; default: the listen address")
    instance: str = option("", "name of this instance in discovery and logs; default: service-port")
    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("json", "log lines", choices=("json", "pretty"))
    metrics_listen: str = option("", "host:port of the Prometheus endpoint; empty: none")
    otlp_traces_endpoint: str = option("", "OTLP/gRPC endpoint for traces, such as http://127.0.0.1:4317; empty: none")
    otlp_tls_ca: str = option("", "PEM authority of an https endpoint for traces; empty: those of the system")
    otlp_sampling_ratio: float = option(
        1.0, "share of requests that are traced, unless their client has decided", at_least=0, at_most=1
    )
    discovery: str = option("static", "where peers are found: static, dns or redis://host:port/db")
    discovery_file: str = option(
        "",
        "file with the value of --discovery; its user and password may change while the service runs",
        file_of="discovery",
    )
    drain_delay_s: float = option(
        0.0,
        "after SIGTERM, how long this service still takes new work, while it already says that it is not ready; longer "
        "than its callers take to notice that",
        at_least=0,
    )
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long running requests may take to finish", at_least=0)
    tls_cert: str = option("", "PEM certificate of this service; with tls_key turns TLS on")
    tls_key: str = option("", "PEM key of this service")
    tls_ca: str = option("", "PEM authority that peers must be signed by (mutual TLS)")
    insecure: bool = option(False, "let other hosts reach ports of this service without TLS")


def load_config(
    cls: type[C], service: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> C:
    """Build the service's config from flags, environment and file, in that order of precedence; what none of them gives
    has its default. The file is that of --config, or of this process's variable QUIRE_CONFIG. Raises ConfigError, or
    exits after printing for `--help`, `--version` and flag syntax."""
    return cls(**{name: value for name, (value, _) in _collect(cls, service, argv, environ).items()})


def explain_config(
    cls: type[Any], service: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return, for every option, its name, its value with secrets masked, the source of the value (`default` if none
    gave it), its default and its help. Raises ConfigError as `load_config` does. --help and --version end the process,
    as in `load_config`."""
    found = _collect(cls, service, argv, environ)
    explained = []
    for field in dataclasses.fields(cls):
        value, source = found.get(field.name, (field.default, "default"))
        explained.append(
            {
                "name": field.name.replace("_", "-"),
                "value": _shown(field, value),
                "source": source,
                "default": field.default,
                "help": field.metadata.get("help", ""),
            }
        )
    return explained


def _collect(
    cls: type[Any], service: str, argv: Sequence[str] | None, environ: Mapping[str, str] | None
) -> dict[str, tuple[Any, str]]:
    """Return the values that were given, by option, each with the name of its source: a flag wins over the environment,
    and that over the file. Values of secrets' files are read too. Raises ConfigError for unknown names and bad values,
    also those of a source over which another one wins."""
    environ = os.environ if environ is None else environ
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    parser = _parser(cls, service, fields, hints)
    flags, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError("UNKNOWN_FLAG", f"Unknown argument {rest[0]!r} for the {service}.", "See --help.")
    values: dict[str, tuple[Any, str]] = {}
    if flags.config:
        for key, raw in _read_yaml(Path(flags.config), service).items():
            name = str(key).replace("-", "_")
            if name not in fields:
                raise _unknown("key", str(key), f"the file {flags.config}", fields)
            source = f"{key} in {flags.config}"
            values[name] = _convert(raw, hints[name], fields[name], source), source
    prefix = f"{ENV_PREFIX}{service.upper()}_"
    for variable, raw in environ.items():
        if variable.startswith(prefix):
            name = variable[len(prefix) :].lower()
            if name not in fields:
                raise _unknown("variable", variable, "the environment", fields)
            values[name] = _convert(raw, hints[name], fields[name], variable), variable
    for name in fields:
        raw = getattr(flags, name)
        if raw is not None:
            flag = "--" + name.replace("_", "-")
            values[name] = _convert(raw, hints[name], fields[name], flag), flag
    _read_secret_files(values, fields, hints)
    return values


def _read_secret_files(
    values: dict[str, tuple[Any, str]], fields: Mapping[str, dataclasses.Field[Any]], hints: Mapping[str, Any]
) -> None:
    """For each option that names the file of a secret, set the secret to the content of that file, in `values`. Raises
    ConfigError if a file cannot be read or is empty, or if a secret and its file are both given."""
    for name, field in fields.items():
        path, source = values.get(name, ("", ""))
        secret = field.metadata.get("file_of")
        if not secret or not path:
            continue
        if secret in values:
            raise ConfigError(
                "SECRET_TWICE",
                f"{source} and {values[secret][1]} both say the same option.",
                "Give one of them.",
                param=name,
            )
        values[secret] = _convert(read_secret(path), hints[secret], fields[secret], source), source


def read_secret(path: str) -> str:
    """Return the content of a secret's file, without white space at its ends. Raises ConfigError for a file that cannot
    be read or is empty."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("SECRET_FILE", f"Cannot read the file {path!r}.", "Give a file of UTF-8 text.") from error
    if not text:
        raise ConfigError("EMPTY_SECRET", f"The file {path!r} is empty.", "Write the value to it.")
    return text


def describe(config: object) -> dict[str, Any]:
    """Return the values of all options as they may be logged: secrets and passwords in URLs masked."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]  # a dataclass instance by contract
    return {field.name: _shown(field, getattr(config, field.name)) for field in fields}


def _shown(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value as it may be shown: secrets are masked, and so are passwords in the URLs of a text; a tuple of
    texts is returned unchanged."""
    if field.metadata.get("secret") and value:
        return "***"
    if isinstance(value, str):
        return _URL_PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", value)
    return value


def split_address(address: str, what: str) -> tuple[str, int]:
    """Split `host:port` in two, without the brackets of an IPv6 host. Raises ConfigError that names `what` for any
    other form, and for a port above 65535. The host is not checked, and the port may be 0."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not re.fullmatch("[0-9]{1,9}", port) or int(port) > 65535:
        raise ConfigError("BAD_ADDRESS", f"{what} is {address!r}, which is not host:port.", "Write 127.0.0.1:8000.")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host: the reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parser(
    cls: type[Any], service: str, fields: Mapping[str, dataclasses.Field[Any]], hints: Mapping[str, Any]
) -> argparse.ArgumentParser:
    """Make the argument parser, with --config, --version and one flag for each option. A flag that is not given is None
    (--config: what `_config_file` says); values stay texts, but boolean options get --flag and --no-flag."""
    parser = argparse.ArgumentParser(prog=f"python -m quire_{service}", description=cls.__doc__, allow_abbrev=False)
    parser.add_argument("--config", default=_config_file(), help="YAML file with the same keys")
    version = f"quire-{service} {installed_version(f'quire-{service}')}"
    parser.add_argument("--version", action="version", version=version)
    for name, field in fields.items():
        flag = "--" + name.replace("_", "-")
        text = f"{field.metadata.get('help', '')} (default: {field.default!r})".replace("%", "%%")
        if hints[name] is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, dest=name, default=None, help=text)
    return parser


def _config_file() -> str:
    """`--config`'s default: the variable QUIRE_CONFIG, shared by all services (sections by service name)."""
    return os.environ.get(f"{ENV_PREFIX}CONFIG", "")


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values. Raises ValueError, whose text may quote the input, if the text is not such YAML, or
    has more than 100 brackets and braces that are open at once, which Python's parser reads in quadratic time. Those
    in texts and comments count too. Where such ones close what is open, the limit of Python's recursion holds."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > _MOST_YAML_DEPTH:
            raise ValueError(f"it has more than {_MOST_YAML_DEPTH} open brackets")
    try:
        loader = _yaml_loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except Exception as error:  # YAMLError, and errors of constructors: a 13th month, `!!bool x`, deep nesting
        raise ValueError(str(error) or type(error).__name__) from error


def _read_yaml(path: Path, service: str) -> Mapping[Any, Any]:
    """Read the file, and return its section for the service, or all of it where it has none; empty for an empty file,
    one that holds only an empty list, 0 or false, or one that holds only sections of other services. Raises ConfigError
    for a file that cannot be read, is not YAML or holds no mapping."""
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError("CONFIG_UNREADABLE", f"Cannot read {path}: {error.strerror}.", "Check --config.") from error
    except ValueError as error:
        raise ConfigError("CONFIG_NOT_YAML", f"{path} is not YAML: {error}.", "Correct the file.") from error
    if not isinstance(loaded, dict):
        raise ConfigError("CONFIG_NOT_YAML", f"{path} holds no mapping.", "Write `key: value` lines.")
    section = loaded.get(service)
    if isinstance(section, dict):
        return section
    # No option has a mapping as its value, so these are sections.
    others = all(name in _SERVICES and isinstance(value, dict) for name, value in loaded.items())
    return {} if others else loaded


def _unknown(kind: str, name: str, where: str, fields: Mapping[str, Any]) -> ConfigError:
    known = ", ".join(sorted(fields))
    return ConfigError("UNKNOWN_KEY", f"Unknown {kind} {name} in {where}.", f"Known keys: {known}.", param=name)


def _convert(raw: Any, hint: Any, field: dataclasses.Field[Any], source: str) -> Any:
    """Return a given value in the option's type, after checking its choices and bounds. Raises ConfigError that names
    the source, also for a secret that is empty. The error masks secrets, and passwords in URLs."""
    shown = _shown(field, repr(raw))
    try:
        value = _parse(raw, hint)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError("BAD_VALUE", f"{source} is {shown}: {error}.", f"{field.metadata.get('help')}.") from error
    if field.metadata.get("secret") and not value:
        # An empty variable is a mistake of deployment; taken as "no key" it would open the door to everybody.
        raise ConfigError("EMPTY_SECRET", f"{source} is given but empty.", "Give a value, or leave it out.")
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError("BAD_VALUE", f"{source} is {shown}.", f"Choose one of {', '.join(choices)}.")
    low, high = bounds_of(field, hint)
    if value is not None and low is not None and not value >= low:  # not >=: NaN is refused too
        raise ConfigError("BAD_VALUE", f"{source} is {shown}.", f"The least value is {low}.")
    if value is not None and high is not None and not value <= high:
        raise ConfigError("BAD_VALUE", f"{source} is {shown}.", f"The greatest value is {high}.")
    return value


def bounds_of(field: dataclasses.Field[Any], hint: Any) -> tuple[float | None, float | None]:
    """Return the least and the greatest value of an option of this type; None where there is no bound. A number without
    a maximum of its own gets one by the unit in its name (`_bytes`, `_ms`, `_s`), else the greatest int32 or float."""
    low, high = field.metadata.get("min"), field.metadata.get("max")
    kinds = {hint, *typing.get_args(hint)}
    if high is None and kinds & {int, float}:
        most = math.nextafter(math.inf, 0) if float in kinds else _MOST_COUNT
        high = next((bound for unit, bound in _MOST_BY_UNIT.items() if field.name.endswith(unit)), most)
    return low, high


def _parse(raw: Any, hint: Any) -> Any:
    """Convert text, or a value from YAML, to the type: bool, int, float, tuple of texts (comma separated) or text. An
    empty value of an optional type is None; for an option that is plain text, YAML's empty value becomes the text None.
    Raises ValueError or TypeError for a value that is none of that type."""
    if isinstance(hint, types.UnionType):
        if raw is None or raw == "":
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        lowered = str(raw).lower()
        if lowered not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError("not a boolean")
        return lowered in ("1", "true", "yes", "on")
    if hint in (int, float):
        kind = "an integer" if hint is int else "a number"
        if hint is int and isinstance(raw, bool | float):
            raise ValueError(f"not {kind}")
        try:
            return hint(raw)
        except ValueError:
            raise ValueError(f"not {kind}") from None  # Python's own text repeats the value, which may be secret
    if typing.get_origin(hint) is tuple:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        return tuple(str(p).strip() for p in parts if str(p).strip())
    if isinstance(raw, dict | list):
        raise ValueError("not a single value")
    return str(raw)


def parse_object(text: str, option: str) -> dict[str, Any]:
    """Parse an option's value as JSON, and return it. Raises ConfigError that names the option unless it is a JSON
    object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_object(option, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _no_object(option, "is not a JSON object")
    return value


def _no_object(option: str, cause: str) -> ConfigError:
    param = option.removeprefix("--").replace("-", "_")
    return ConfigError("BAD_JSON_OPTION", f"{option} {cause}.", "Give an object: '{\"name\": value}'.", param=param)
