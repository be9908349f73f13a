"""ResponseDocument: what its brief form leaves out."""

from __future__ import annotations

from typing import Any

import orjson

from quire_router.front.http.responses.document import ResponseDocument, echoed_fields

LONG = "x" * 10_000


def test_brief_response_has_no_long_field_of_the_request() -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object", "description": LONG}}
    values: dict[str, Any] = {
        "reasoning": None,
        "instructions": LONG,
        "metadata": {"a": LONG},
        "text": {"format": schema},
        "tools": [{"type": "function", "name": "f", "description": LONG}],
        "tool_choice": {"type": "function", "name": LONG},
        "user": LONG,
    }
    echoed = [(name, orjson.dumps(value).decode()) for name, value in echoed_fields(values).items()]
    document = ResponseDocument("resp_a", echoed, "m", 1, background=True, store=True)
    whole, brief = document.running(), document.brief(document.running())
    assert len(orjson.dumps(whole)) > 5 * len(LONG) and len(orjson.dumps(brief)) < 2000
    assert brief.keys() == whole.keys() and brief["text"] == {"format": {"type": "text"}}
