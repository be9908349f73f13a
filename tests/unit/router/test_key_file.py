"""The key file gives API keys their names, scopes and limits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_common.errors import ConfigError, PermissionDenied, Unauthenticated
from quire_router.api_keys import load_api_keys
from quire_router.principal import ADMIN, INFERENCE, METRICS, KeyLimits


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(tmp_path: Path, *entries: Any) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text("# who may enter\n" + yaml.safe_dump({"keys": list(entries)}))
    return str(file)


def test_named_keys_have_scopes_and_limits(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"name": "alice", "sha256": digest("a-old"), "scopes": [INFERENCE], "tokens_per_minute": 50},
        {"name": "alice", "sha256": digest("a-new").upper(), "scopes": [INFERENCE], "tokens_per_minute": 50},
        {"name": "ops", "sha256": digest("o"), "scopes": [ADMIN], "requests_per_minute": 0},
    )
    keys = load_api_keys(["plain"], path, KeyLimits(requests_per_minute=7))
    old, new = (keys.authenticate(f"Bearer {key}") for key in ("a-old", "a-new"))
    assert (old.tenant, old.name, old.limits) == (new.tenant, "alice", KeyLimits(7, 50))
    assert keys.authenticate("Bearer plain").limits == KeyLimits(7, 0)
    assert keys.authenticate("Bearer plain", METRICS).name == ""
    assert keys.authenticate("Bearer o", ADMIN).limits == KeyLimits(0, 0)
    assert not keys.admit("Bearer o") and keys.admit("Bearer o", ADMIN)
    for key in ("a-old", "plain"):
        with pytest.raises(PermissionDenied, match="no scope `admin`"):
            keys.authenticate(f"Bearer {key}", ADMIN)
    with pytest.raises(Unauthenticated):
        keys.authenticate("Bearer " + digest("a-old"))


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ([], "no YAML list"),
        (["k"], "Key 1 .* not a mapping"),
        ([{"name": "a"}], "sha256 is not 64"),
        ([{"name": "a", "sha256": "secret"}], "sha256 is not 64"),
        ([{"name": "", "sha256": digest("k")}], "its name"),
        ([{"name": "a", "sha256": digest("k"), "key": "k"}], "Key 1 .*: field 1 is unknown"),
        ([{"name": "a", "sha256": digest("k")}, {"sk-secret": {"name": "a"}}], "Key 2 .*: field 1 is unknown"),
        ([{"name": "a", "sha256": digest("k"), "scopes": ["root"]}], "known scopes"),
        ([{"name": "a", "sha256": digest("k"), "scopes": []}], "known scopes"),
        ([{"name": "a", "sha256": digest("k"), "tokens_per_minute": -1}], "tokens_per_minute"),
        ([{"name": "a", "sha256": digest("k"), "tokens_per_minute": True}], "tokens_per_minute"),
        ([{"name": "a", "sha256": digest("k"), "tokens_per_minute": 10**400}], "tokens_per_minute is not between"),
        ([{"name": "a", "sha256": digest("k"), "weight": 0}], "weight is not between 1 and 1000"),
        ([{"name": "a", "sha256": digest("k"), "weight": 1.5}], "weight is not a whole number"),
        ([{"name": "a", "sha256": digest("k"), "models": "m"}], "models is not a list of names"),
        ([{"name": "a", "sha256": digest("k"), "models": [""]}], "models is not a list of names"),
        ([{"name": "a", "sha256": digest("k"), "models": []}], "models is empty"),
        (
            [{"name": "a", "sha256": digest(key), "models": [key]} for key in "kl"],
            "differ in their limits",
        ),
        ([{"name": "a", "sha256": digest("k"), "max_concurrent": -1}], "max_concurrent is not between 0 and"),
        ([{"name": "a", "sha256": digest("k"), "highest_priority": 2**31}], "highest_priority is not between"),
        ([{"name": "a", "sha256": digest("k"), "kept_responses_mib": -1}], "kept_responses_mib is not between 0"),
        (
            [{"name": "a", "sha256": digest("k")}, {"name": "b", "sha256": digest("k")}],
            r"'a' \(key 1\) .* 'b' \(key 2\)",
        ),
        (
            [{"name": "a", "sha256": digest("k")}, {"name": "a", "sha256": digest("l"), "tokens_per_minute": 1}],
            "differ in their limits",
        ),
    ],
)
def test_error_of_a_bad_key_file_holds_no_secrets(tmp_path: Path, entries: list[Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as caught:
        load_api_keys([], write(tmp_path, *entries))
    assert "secret" not in str(caught.value) and digest("k") not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["keys: [", "keys: 5", "keys:\n- name: a\nmore: 1", "keys: 2001-99-99", "keys: !!bool x", "keys: " + "[" * 5000],
)
def test_malformed_yaml_key_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no YAML list"):
        load_api_keys([], str(file))


_ENTRY = f"- name: a\n  sha256: {digest('k')}\n"


@pytest.mark.parametrize(
    "text",
    [
        f"---\nkeys:\n{_ENTRY}",
        f"\ufeffkeys:\n{_ENTRY}",
        f'"keys":\n{_ENTRY}',
        f"{{keys: [{{name: a, sha256: {digest('k')}}}]}}",
        _ENTRY,
        f"api_keys:\n{_ENTRY}",
        "---",
        "-----BEGIN",
        "\ufeffplain-key",
        "{",
        "[",
        '"quoted"',
        "good-key\na: b",
        "good-key\ntwo words",
    ],
)
def test_yaml_without_the_keys_header_is_not_read_as_plain_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may enter\n" + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Line [23] .* is not a plain key") as caught:
        load_api_keys([], str(file))
    assert "`keys:`" in caught.value.fix and digest("k") not in str(caught.value)


def test_plain_key_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  sk-Ab_9+/=  \nquire-x.y~z\n")
    keys = load_api_keys([], str(file))
    assert keys.admit("Bearer sk-Ab_9+/=") and keys.admit("Bearer quire-x.y~z") and not keys.admit("Bearer # ours")


@pytest.mark.parametrize(
    ("form", "count", "repeated", "cause"),
    [
        ("plain", 10_001, 0, "has 10001 keys"),
        ("yaml", 10_001, 0, "has 10001 keys"),
        ("plain", 2, 1, "Line 4 .* repeats a key"),
        ("yaml", 2, 1, "has a key twice"),
    ],
)
def test_both_forms_bound_their_keys_and_refuse_a_key_twice(
    tmp_path: Path, form: str, count: int, repeated: int, cause: str
) -> None:
    secrets = [f"secret-{index}" for index in range(count)]
    secrets += secrets[:repeated]
    if form == "yaml":
        path = write(tmp_path, *({"name": "a", "sha256": digest(key)} for key in secrets))
    else:
        (tmp_path / "keys").write_text("\n".join(["# ours", *secrets]))
        path = str(tmp_path / "keys")
    with pytest.raises(ConfigError, match=cause) as caught:
        load_api_keys([], path)
    assert "secret" not in str(caught.value)
