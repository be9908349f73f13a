"""A distribution's version, installed or not."""

from __future__ import annotations

from importlib.metadata import version

from quire_common.version import FROM_SOURCE, installed_version


def test_what_is_installed_has_its_version_and_a_checkout_says_so() -> None:
    assert installed_version("grpcio") == version("grpcio")
    assert installed_version("quire-no-such-service") == FROM_SOURCE
