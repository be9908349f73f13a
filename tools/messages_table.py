"""Writes docs/messages.md: every message between services, its bound in bytes, and what enforces it.

Rows are found by walking the contracts' descriptors and the frames' kinds; bounds are the constants that the code
checks by. `python -m tools.messages_table` writes the file; a test fails where it is out of date, and where a message
has no row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.v1 import inference_pb2, kvstore_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2
from quire_common.kv.page_events import FRAME_PAGES
from quire_common.kv_data.frame import BODY_BYTES, FRAME_BYTES, MAX_PAYLOAD_BYTES, FrameKind
from quire_common.transport import MAX_MESSAGE_BYTES
from quire_kvstore.puts import MAX_FRAME_BYTES as PUT_FRAME_BYTES
from quire_router.replicas.session_outgoing import MAX_BYTES as SESSION_BYTES
from quire_router.requests.products import MAX_ALTERNATIVES, MAX_PROMPT_ALTERNATIVES
from quire_router.text.rows_codec import MESSAGE_BYTES
from quire_router.text.tokenize_stream import MOST_BYTES as TOKENIZE_BYTES
from quire_scheduler.batching.admission import MAX_START_BYTES
from quire_scheduler.service.output_split import PIECE_BYTES
from quire_scheduler.service.session import MOST_JOINED_BYTES
from quire_tokenizer.detokenize.long_answer import MOST_CHARS
from quire_worker.engine.run.report_bundle import MAX_BYTES as REPORT_BYTES
from quire_worker.engine.step_schedule import MAX_SCORE_BYTES
from quire_worker.kv_transfer.peers.tunnel_stream import PIECE_BYTES as TUNNEL_BYTES
from quire_worker.kv_transfer.wire import MAX_FRAME_BYTES as AGENT_FRAME_BYTES
from quire_worker.kv_transfer.wire import AgentFrameKind

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

DOCUMENT = Path(__file__).parent.parent / "docs" / "messages.md"
CONTRACTS = (inference_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2, kvstore_pb2)

# A page's hash with what protobuf puts before it, and an alternative of a token, in columns and as public messages.
_HASH, _ALTERNATIVE, _PUBLIC_ALTERNATIVE = 34, 8, 20


def size(count: int) -> str:
    """Bytes, as people say them."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


_CHANNEL = f"gRPC's {size(MAX_MESSAGE_BYTES)}: the call alone ends"
_SMALL = ("below 1 KiB", "its fields")
_MODEL = ("below 64 KiB", "one model's names, geometry and addresses")
_TICKET = f"{_HASH} bytes a page of the prompt"
_KEYS = (f"`--max-keys` x {_HASH} bytes ({size(8192 * _HASH)})", "page_store.py; a scheduler asks for 8,192 at most")
_LEASE = ("below 1 KiB", "a lease's name")
_PAGES = f"{FRAME_PAGES:,} pages, or those of one request: {_HASH} bytes each, and 4 a token where asked for"

# By `Service.Method`: bound and enforcer of the request, or of each message of its stream, and of the answer.
RPCS: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "Inference.Generate": (
        ("`--max-body-bytes` (4 MiB)", "the public port's gRPC options"),
        (
            f"what came since the client last read; of prompt logprobs {MAX_PROMPT_ALTERNATIVES:,} alternatives of "
            f"about {_PUBLIC_ALTERNATIVE} bytes ({size(MAX_PROMPT_ALTERNATIVES * _PUBLIC_ALTERNATIVE)})",
            f"products.py, which takes {MAX_ALTERNATIVES:,} of answers; {_CHANNEL}",
        ),
    ),
    "Inference.ListModels": (_SMALL, ("a ModelInfo, below 64 KiB, for each served name", "configuration")),
    "Scheduler.Session": (
        (
            f"{size(SESSION_BYTES)} and one more Submit (4 bytes a token of its sequence, controls, {_TICKET} of its "
            "ticket) or Handover",
            "session_outgoing.py, `--max-body-bytes` and the model's context",
        ),
        (
            f"{size(PIECE_BYTES)}, or one row or ticket ({_TICKET}); of steps that wait {size(MOST_JOINED_BYTES)}",
            "output_split.py, session.py",
        ),
    ),
    "Scheduler.GenerateTokens": (
        ("4 bytes a token of the sequence, and its controls", _CHANNEL),
        (f"{size(PIECE_BYTES)}, or one row", "output_split.py"),
    ),
    "Scheduler.GetModelInfo": (_SMALL, _MODEL),
    "Scheduler.WatchLoad": (_SMALL, ("below 2 KiB", "load_watch.py cuts the detail at 500 characters")),
    "Scheduler.WatchPages": (_SMALL, (_PAGES, "page_events.py, and pieces of a snapshot in page_names.py")),
    "Scheduler.Drain": (_SMALL, _SMALL),
    "Scheduler.GetTicket": (_SMALL, (_TICKET, "the model's context")),
    "Scheduler.SetRole": (_SMALL, _SMALL),
    "Tokenizer.Encode": (
        ("`--max-text-bytes` (16 MiB) in `--max-texts` (1,024)", "encoder.py"),
        ("4 bytes a token: of so much text at most 64 MiB, of a public request 16 MiB", f"max_tokens; {_CHANNEL}"),
    ),
    "Tokenizer.RenderChat": (
        ("`--max-text-bytes` (16 MiB)", "conversation.py"),
        ("4 bytes a token, or the text", f"max_tokens, the renderer's memory; {_CHANNEL}"),
    ),
    "Tokenizer.Tokenize": (
        (size(TOKENIZE_BYTES), "tokenize_stream.py: larger work is a call of its own"),
        (f"4 bytes a token, at most {size(4 * TOKENIZE_BYTES)}, or the rendered text", "the request's size, templates"),
    ),
    "Tokenizer.Detokenize": (
        (f"{size(MESSAGE_BYTES)} of tokens, and one open's stop strings", "rows_codec.py, stream_outgoing.py"),
        (f"{MOST_CHARS:,} characters", "long_answer.py"),
    ),
    "Tokenizer.Decode": (
        ("`--max-token-ids` (1,048,576) x 4 bytes", "the tokenizer's servicer"),
        ("the bytes of these tokens", _CHANNEL),
    ),
    "Tokenizer.GetTokenBytes": (
        ("`--max-token-ids` (1,048,576) x 4 bytes", "the tokenizer's servicer"),
        ("the bytes of these tokens", _CHANNEL),
    ),
    "Tokenizer.GetTokenizerInfo": (_SMALL, ("below 4 KiB", "a model's names and marks")),
    "Worker.Load": (_SMALL, _MODEL),
    "Worker.Run": (
        (
            f"starts of {size(MAX_START_BYTES)}, or one; {_HASH + 4} bytes a page that begins to move, and 12 a page "
            "that is granted",
            "admission.py, the number of device pages",
        ),
        (
            f"prompt logprobs of {size(MAX_SCORE_BYTES)}; 17 bytes a row, and {_ALTERNATIVE} for each of its "
            f"alternatives (256 at most); several steps together {size(REPORT_BYTES)}",
            "step_schedule.py, `--max-num-seqs`, report_bundle.py",
        ),
    ),
    "Worker.GetStatus": (_SMALL, _SMALL),
    "Peer.Connect": (
        (size(TUNNEL_BYTES), "tunnel_stream.py"),
        (size(TUNNEL_BYTES), "tunnel_stream.py"),
    ),
    "KvStore.LookupAndPin": (_KEYS, ("16 bytes a page, where the lookup is direct; else below 1 KiB", "`--max-keys`")),
    "KvStore.BeginPut": (_KEYS, ("4 bytes a page", "`--max-keys`")),
    "KvStore.Put": ((f"{size(PUT_FRAME_BYTES)} of a page", f"the sender; {_CHANNEL}"), _SMALL),
    "KvStore.CommitPut": (_LEASE, _SMALL),
    "KvStore.Get": (("4 bytes a page", "`--max-keys`"), (f"{size(PUT_FRAME_BYTES)} of a page", "servicer.py")),
    "KvStore.Attach": (_LEASE, ("16 bytes a page", "`--max-keys`")),
    "KvStore.Check": (_LEASE, _SMALL),
    "KvStore.Renew": (_LEASE, _SMALL),
    "KvStore.Release": (("18 bytes a lease", "a scheduler's requests, `--max-leases` (4,096)"), _SMALL),
    "KvStore.Watch": (_SMALL, (_PAGES, "page_events.py, page_watch.py")),
    "KvStore.Stats": (_SMALL, ("below 4 KiB", "three tiers")),
}

_HEAD = "none"
_INDICES = "4 bytes a page"
# Payloads of data connections, by kind of frame.
DATA_FRAMES: Mapping[FrameKind, str] = {
    FrameKind.GET: _INDICES,
    FrameKind.PUT: f"{size(BODY_BYTES)} of a page's body",
    FrameKind.DAMAGED: _HEAD,
    FrameKind.MAP: _HEAD,
    FrameKind.LEND: _HEAD,
    FrameKind.TAKE: _HEAD,
    FrameKind.DONE: _HEAD,
    FrameKind.LOCATE: _HEAD,
    FrameKind.AGENT: _HEAD,
    FrameKind.SHOW: _INDICES,
    FrameKind.PAGE: f"{size(BODY_BYTES)} of a page's body",
    FrameKind.END: _HEAD,
    FrameKind.TAKEN: _HEAD,
    FrameKind.REFUSED: "an error's code",
    FrameKind.ALIVE: _HEAD,
    FrameKind.PLACED: "4 bytes a page, 4,096 pages at most; or a NIXL agent's metadata",
    FrameKind.SHOWN: "136 bytes a page, half of the peer's window at most",
}
# Payloads between a worker and its transfer agent processes.
AGENT_FRAMES: Mapping[AgentFrameKind, str] = {
    AgentFrameKind.SETUP: "the configuration, as JSON",
    AgentFrameKind.MOVE: f"{_HASH + 4} bytes a page",
    AgentFrameKind.FILLED: "8 bytes a slot of the ring",
    AgentFrameKind.RETURNED: "4 bytes a slot of the ring",
    AgentFrameKind.CANCEL: _HEAD,
    AgentFrameKind.PING: _HEAD,
    AgentFrameKind.CUT: _HEAD,
    AgentFrameKind.OFFERED: "4 bytes",
    AgentFrameKind.FETCHED: "4 bytes",
    AgentFrameKind.READY: _HEAD,
    AgentFrameKind.WANTED: "4 bytes a page of the move",
    AgentFrameKind.ARRIVED: "8 bytes a slot of the ring",
    AgentFrameKind.RELEASED: "4 bytes a slot of the ring",
    AgentFrameKind.ENDED: "8 bytes",
    AgentFrameKind.PONG: _HEAD,
    AgentFrameKind.FETCH: "4 bytes a page of the move",
    AgentFrameKind.KEPT: "4 bytes",
}
# ZeroMQ messages and Redis values: name, bound and enforcer.
ZMQ = (
    (
        "topic, number (8 bytes), batch of changes",
        "256 changes; each a request's pages: 14 bytes a page, 5 a token",
        "event_pump.py",
    ),
    ("topic, number, piece of a snapshot", "1,024 pages", "page_names.py"),
    ("replay request: client, empty frame, number", "8 bytes; others are dropped", "zmq_publisher.py"),
    (
        "replay answer: client, empty frame, number, batch",
        "as the batch; `buffer_steps` (10,000) are kept",
        "zmq_publisher.py",
    ),
)
REDIS = (
    ("`quire:endpoint:SERVICE:INSTANCE`", "below 1 KiB", "one address and its metadata, for `ttl_s`"),
    ("`quire:instances:SERVICE`", "an instance's name each", "those that have gone are taken out"),
    ("`quire:life`", "below 100 bytes", "a random value"),
    (
        "`quire:limit:{TENANT}:requests`, `:tokens`",
        "two numbers, and one for each router",
        "expires when the bucket is full",
    ),
    ("`quire:response:TENANT:ID`", "`--responses-max-mib` (64 MiB)", "store.py, for `--responses-ttl-s`"),
    (
        "`quire:page:` namespace, hash, group",
        "a page and 128 bytes; a page `--max-page-bytes` (256 MiB)",
        "put_manager.py, for `--redis-ttl-s`",
    ),
)


def methods() -> dict[str, MethodDescriptor]:
    """Every RPC of the contracts, by `Service.Method`."""
    services = [service for contract in CONTRACTS for service in contract.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}.{method.name}": method for service in services for method in service.methods}


def document() -> str:
    """The whole page. Raises KeyError for a message without a row."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Messages between services, and their bounds"
    yield ""
    yield f"No gRPC message is larger than {size(MAX_MESSAGE_BYTES)}: a larger one ends its call, and with a stream all"
    yield "requests that share it. Senders therefore cut or refuse what goes into shared streams far below that."
    yield "`python -m tools.messages_table` writes this page from the contracts and the constants that the code uses."
    yield ""
    yield "## RPCs"
    yield ""
    yield "| RPC | message | at most | what enforces it |"
    yield "|---|---|---|---|"
    for name, method in methods().items():
        request, response = RPCS[name]
        sides = (
            (method.client_streaming, method.input_type, request),
            (method.server_streaming, method.output_type, response),
        )
        for stream, message, (bound, enforcer) in sides:
            yield f"| {name} | {'stream of ' if stream else ''}{message.name} | {bound} | {enforcer} |"
    yield ""
    yield "## Frames of data connections"
    yield ""
    yield f"A frame is a head of {FRAME_BYTES} bytes and a payload of {size(MAX_PAYLOAD_BYTES)} at most; a longer one"
    yield "ends the connection (`kv_data/frame.py`)."
    yield ""
    yield "| frame | payload |"
    yield "|---|---|"
    for kind in FrameKind:
        yield f"| {kind.name} | {DATA_FRAMES[kind]} |"
    yield ""
    yield "## Frames between a worker and its transfer agents"
    yield ""
    yield f"At most {size(AGENT_FRAME_BYTES)} each (`kv_transfer/wire.py`); bytes of pages lie in shared memory."
    yield ""
    yield "| frame | payload |"
    yield "|---|---|"
    for agent_frame_kind in AgentFrameKind:
        yield f"| {agent_frame_kind.name} | {AGENT_FRAMES[agent_frame_kind]} |"
    for title, rows in (("KV events over ZeroMQ", ZMQ), ("Redis", REDIS)):
        yield ""
        yield f"## {title}"
        yield ""
        yield f"| {'key' if rows is REDIS else 'message'} | at most | what enforces it |"
        yield "|---|---|---|"
        for row in rows:
            yield "| {} | {} | {} |".format(*row)


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
