"""docs/limits.md lists every field of HTTP and of the public contract, with its bound and its cost class."""

from __future__ import annotations

from tools import limits_table


def test_limits_page_is_up_to_date() -> None:
    assert limits_table.DOCUMENT.read_text() == limits_table.document(), "run `python -m tools.limits_table`"


def test_every_field_has_a_bound_and_a_known_cost_class() -> None:
    rows = [limits_table.row(name) for name in limits_table.http_fields()]
    rows += [limits_table.rpc_row(key, name) for key, name in limits_table.rpc_fields().items()]
    assert [field for field, bound, _ in rows if not bound] == []
    assert {cost for _, _, cost in rows} <= limits_table.CLASSES.keys()


def test_cost_classes_name_only_existing_fields() -> None:
    supported = {name for name, fields in limits_table.http_fields().items() if any(f.supported for f in fields)}
    contract = limits_table.rpc_fields()
    assert set(limits_table.FIELDS) <= supported | set(contract.values())
    assert set(limits_table.RPC_FIELDS) <= contract.keys()


def test_numbers_and_lists_are_bounded_on_both_sides() -> None:
    """A number without a bound is one that some product of it has no bound either."""
    unbounded = [
        name
        for name, fields in limits_table.http_fields().items()
        for field in fields
        if field.supported
        and (
            (field.kind in ("int", "number") and field.high == float("inf"))
            or (field.kind in ("strings", "ints", "list", "biases", "texts") and not field.max_items)
        )
    ]
    assert unbounded == []
