"""docs/messages.md: every message of every RPC, and every kind of frame, has its bound there."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import quire.v1
from quire_common.kv_data.frame import FrameKind
from quire_common.transport import MAX_MESSAGE_BYTES
from quire_router.replicas.session_outgoing import MAX_BYTES as SESSION_BYTES
from quire_scheduler.batching.admission import MAX_START_BYTES
from quire_scheduler.service.output_split import PIECE_BYTES
from quire_scheduler.service.session import MOST_JOINED_BYTES
from quire_worker.engine.run.report_bundle import MAX_BYTES as REPORT_BYTES
from quire_worker.engine.step_schedule import MAX_SCORE_BYTES
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.matcher.wire import MatcherFrameKind
from tools import messages_table


def test_the_page_is_what_the_contracts_say() -> None:
    assert messages_table.DOCUMENT.read_text() == messages_table.document(), "run `python -m tools.messages_table`"


def test_every_message_of_an_rpc_has_a_row() -> None:
    assert set(messages_table.RPCS) == set(messages_table.methods())
    assert all(len(bounds) == 2 and all(map(all, bounds)) for bounds in messages_table.RPCS.values())


def test_no_contract_is_left_out() -> None:
    modules = [import_module(f"quire.v1.{m.name}") for m in pkgutil.iter_modules(quire.v1.__path__)]
    named = {
        f"{service.name}.{method.name}"
        for module in modules
        if module.__name__.endswith("_pb2")
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert named == set(messages_table.methods())


def test_every_kind_of_frame_has_a_row() -> None:
    assert set(messages_table.DATA_FRAMES) == set(FrameKind)
    assert set(messages_table.AGENT_FRAMES) == set(AgentFrameKind)
    assert set(messages_table.MATCHER_FRAMES) == set(MatcherFrameKind)


def test_bounds_of_shared_streams_are_far_below_what_ends_them() -> None:
    bounds = (
        SESSION_BYTES,
        PIECE_BYTES,
        MOST_JOINED_BYTES,
        MAX_START_BYTES,
        MAX_SCORE_BYTES + REPORT_BYTES,
    )
    assert max(bounds) * 2 < MAX_MESSAGE_BYTES
