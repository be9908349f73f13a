"""Configuration: precedence, types, bounds; whatever is wrong is fatal and named."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.local.spec import SERVICES
from quire_common.config import ServiceConfig, describe, explain_config, load_config, option, split_address
from quire_common.errors import ConfigError
from quire_kvstore.config import KvstoreConfig
from quire_router.config import RouterConfig
from quire_scheduler.config import SchedulerConfig
from quire_tokenizer.config import TokenizerConfig
from quire_worker.config import WorkerConfig


@dataclass(frozen=True)
class DemoConfig(ServiceConfig):
    """For tests."""

    size: int = option(3, "a size", at_least=1, at_most=10)
    ratio: float = option(0.5, "a ratio", at_least=0)
    fast: bool = option(False, "a switch")
    names: tuple[str, ...] = option((), "names")
    key: tuple[str, ...] = option((), "keys", secret=True)
    limit: int | None = option(None, "a limit")


def load(*argv: str, **environ: str) -> DemoConfig:
    return load_config(DemoConfig, "demo", argv, environ)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("size: 5\nratio: 2\nnames: [a, b]\nlog-level: warning\n")
    flags = ("--config", str(file), "--size", "7")
    config = load(*flags, QUIRE_DEMO_SIZE="6", QUIRE_DEMO_RATIO="3")
    assert (config.size, config.ratio, config.names, config.log_level) == (7, 3.0, ("a", "b"), "warning")
    assert config.fast is False and config.limit is None


def test_one_file_may_hold_a_section_for_each_service(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("demo:\n  size: 4\nrouter:\n  port: 1\n")
    assert load("--config", str(file)).size == 4


def test_a_file_may_hold_sections_of_other_services_alone(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("".join(f"{service}: {{any: 4}}\n" for service in SERVICES))
    assert load("--config", str(file)).size == 3
    file.write_text("wroker:\n  max-num-seqs: 4\n")
    with pytest.raises(ConfigError, match="wroker"):
        load("--config", str(file))


def test_types() -> None:
    config = load("--fast", "--names", "a, b,", "--limit", "3")
    assert (config.fast, config.names, config.limit) == (True, ("a", "b"), 3)
    assert load("--no-fast", QUIRE_DEMO_FAST="yes").fast is False


@pytest.mark.parametrize(
    ("argv", "environ", "code", "named"),
    [
        (("--size", "0"), {}, "BAD_VALUE", "--size"),
        (("--size", "11"), {}, "BAD_VALUE", "--size"),
        (("--size", "2.5"), {}, "BAD_VALUE", "--size"),
        (("--ratio", "nan"), {}, "BAD_VALUE", "--ratio"),
        (("--log-level", "loud"), {}, "BAD_VALUE", "--log-level"),
        (("--sizes", "1"), {}, "UNKNOWN_FLAG", "--sizes"),
        ((), {"QUIRE_DEMO_FAST": "perhaps"}, "BAD_VALUE", "QUIRE_DEMO_FAST"),
        ((), {"QUIRE_DEMO_SIZES": "1"}, "UNKNOWN_KEY", "QUIRE_DEMO_SIZES"),
        ((), {"QUIRE_DEMO_KEY": ""}, "EMPTY_SECRET", "QUIRE_DEMO_KEY"),
        (("--key", " , "), {}, "EMPTY_SECRET", "--key"),
    ],
)
def test_what_is_wrong_is_named(argv: tuple[str, ...], environ: dict[str, str], code: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    assert caught.value.code == code
    assert named in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sizes: 1", "UNKNOWN_KEY"),
        ("size: [1]", "BAD_VALUE"),
        ("size: true", "BAD_VALUE"),
        ("[1, 2]", "CONFIG_NOT_YAML"),
        ("a: b: c", "CONFIG_NOT_YAML"),
        ("size: 2001-99-99", "CONFIG_NOT_YAML"),
        ("size: !!bool x", "CONFIG_NOT_YAML"),
        ("[" * 5000, "CONFIG_NOT_YAML"),
        ("!!python/object/apply:os.getcwd []", "CONFIG_NOT_YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, code: str) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(file))
    assert caught.value.code == code


def test_other_services_variables_are_not_ours() -> None:
    assert load(QUIRE_ROUTER_PORT="1", QUIRE_DATA_DIR="/data").size == 3


@pytest.mark.parametrize("flag", ["--size", "--ratio"])
def test_a_url_given_as_a_number_is_masked_in_the_error(flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(flag, "redis://:hunter2@host:6379/0")
    assert "redis://:***@host:6379/0" in str(raised.value) and "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is not None and "hunter2" not in str(raised.value.__cause__)


def test_secrets_are_masked() -> None:
    shown = describe(load("--key", "hunter2"))
    assert shown["key"] == "***"
    assert "hunter2" not in str(shown)
    assert describe(load())["key"] == ()


@pytest.mark.parametrize(
    ("discovery", "told"),
    [
        ("static", "static"),
        ("redis://host:6379/0?ttl_s=3", "redis://host:6379/0?ttl_s=3"),
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:hunter2@x:hunter2@host/0", "rediss://me:***@host/0"),
        ("redis://host/0?ttl_s=3&password=hunter2&poll_s=1", "redis://host/0?ttl_s=3&password=***&poll_s=1"),
    ],
)
def test_of_a_url_the_password_is_masked(discovery: str, told: str) -> None:
    flags = (f"--discovery={discovery}",)
    assert describe(load(*flags))["discovery"] == told
    (explained,) = (one for one in explain_config(DemoConfig, "demo", flags, {}) if one["name"] == "discovery")
    assert explained["value"] == told
    assert load(*flags).discovery == discovery


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "host:²", "host:" + "9" * 5000]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError):
        split_address(address, "--listen")


@given(st.integers(0, 65535))
def test_addresses(port: int) -> None:
    assert split_address(f"[::1]:{port}", "--listen") == ("::1", port)


@dataclass(frozen=True)
class SecretConfig(ServiceConfig):
    """A service with a secret."""

    password: str = option("", "the password", secret=True)
    password_file: str = option("", "file with the password", file_of="password")


def test_a_secret_comes_from_its_file_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("  hunter2\n")
    for argv, environ in (
        (["--password-file", str(file)], {}),
        ([], {"QUIRE_SECRET_PASSWORD_FILE": str(file)}),
    ):
        config = load_config(SecretConfig, "secret", argv, environ)
        assert (config.password, config.password_file) == ("hunter2", str(file))
        assert "hunter2" not in str(explain_config(SecretConfig, "secret", argv, environ))


def test_a_secrets_file_must_be_readable_full_and_the_only_source(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2")
    for argv, code in (
        (["--password-file", str(tmp_path / "none")], "SECRET_FILE"),
        (["--password-file", str(file), "--password", "other"], "SECRET_TWICE"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(SecretConfig, "secret", argv, {})
        assert caught.value.code == code and "hunter2" not in str(caught.value)
    file.write_text(" \n")
    with pytest.raises(ConfigError) as caught:
        load_config(SecretConfig, "secret", ["--password-file", str(file)], {})
    assert caught.value.code == "EMPTY_SECRET"


@pytest.mark.parametrize("text", ["password: ['redis://:hunter2@h']", "discovery: ['redis://:hunter2@h']"])
def test_an_error_shows_no_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(SecretConfig, "secret", ["--config", str(file)], {})
    assert caught.value.code == "BAD_VALUE" and "hunter2" not in str(caught.value)


def test_every_secret_of_every_service_has_a_file_form() -> None:
    configs = (RouterConfig, SchedulerConfig, TokenizerConfig, WorkerConfig, KvstoreConfig)
    for config in configs:
        named = {field.name: field for field in fields(config)}
        for name, field in named.items():
            if field.metadata.get("secret") or name == "discovery":
                assert f"{name}_file" in named, (config, name)
