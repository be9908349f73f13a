"""Where each replica of a stack publishes its KV events: of several, each needs ports of its own.

As in vLLM for its data-parallel ranks, the ports that were given are the first replica's, and grow by one with each
that follows. An endpoint that is a consumer's, who binds it, is the same for all. Text that is not understood is left
as it is: the scheduler says what is wrong with it.
"""

from __future__ import annotations

import json
import re

_DEFAULT = "tcp://127.0.0.1:5557"
_TCP = re.compile(r"(tcp://.+):(\d+)")


def kv_events_of(text: str, replica: int) -> str:
    """--kv-events-config as replica number `replica`, from 0 on, is to have it."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    if not isinstance(config, dict) or not replica:
        return text
    endpoint, bind = config.get("endpoint", _DEFAULT), config.get("bind")
    if not isinstance(endpoint, str):
        return text
    if bind is None:
        bind = "*" in endpoint or "::" in endpoint or endpoint == _DEFAULT
    if bind:
        config |= {"endpoint": _shifted(endpoint, replica), "bind": True}
    if isinstance(replay := config.get("replay_endpoint"), str):
        config["replay_endpoint"] = _shifted(replay, replica)
    return json.dumps(config)


def _shifted(endpoint: str, by: int) -> str:
    found = _TCP.fullmatch(endpoint)
    return f"{found[1]}:{int(found[2]) + by}" if found else endpoint
