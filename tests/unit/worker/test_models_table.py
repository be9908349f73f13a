"""docs/models.md lists the families of the registry."""

from __future__ import annotations

from quire_worker.model.architectures import FAMILIES
from tests.parity.families import CASES, causal_class
from tools import models_table


def test_the_page_is_what_the_registry_says() -> None:
    assert models_table.DOCUMENT.read_text() == models_table.document(), "run `python -m tools.models_table`"


def test_every_architecture_is_compared_with_transformers() -> None:
    compared = {causal_class(name) for name in CASES}
    # Old names of an architecture that is compared under its new one.
    assert set(FAMILIES) - compared == {"MPTForCausalLM"}
