"""Writes docs/messages.md: every message between services, its bound in bytes, and what enforces the bound.

The program finds the rows in the contracts' descriptors and the kinds of frames. The bounds are the constants of the
code. `python -m tools.messages_table` writes the file. A test fails if the file is out of date, or if a message has no
row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.v1 import inference_pb2, kvstore_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2
from quire_common.kv.page_events import FRAME_PAGES
from quire_common.kv_data.frame import BODY_BYTES, FRAME_BYTES, MAX_PAYLOAD_BYTES, FrameKind
from quire_common.structured.constraint import MAX_GRAMMAR_BYTES
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
from quire_tokenizer.grammar.grammar_compiler import MAX_SOURCE_BYTES
from quire_worker.engine.run.report_bundle import MAX_BYTES as REPORT_BYTES
from quire_worker.engine.step_schedule import MAX_SCORE_BYTES
from quire_worker.kv_transfer.peers.tunnel_stream import PIECE_BYTES as TUNNEL_BYTES
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.matcher.wire import MatcherFrameKind
from quire_worker.side_process.frames import MAX_FRAME_BYTES as AGENT_FRAME_BYTES

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

DOCUMENT = Path(__file__).parent.parent / "docs" / "messages.md"
CONTRACTS = (inference_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2, kvstore_pb2)

# A page's hash with what protobuf puts before it, and an alternative of a token, in columns and as public messages.
_HASH, _ALTERNATIVE, _PUBLIC_ALTERNATIVE = 34, 8, 20


def size(count: int) -> str:
    """Return a number of bytes in words."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


_CHANNEL = f"gRPC's limit of {size(MAX_MESSAGE_BYTES)}, which ends only this call"
_SMALL = ("below 1 KiB", "the message has only small fields")
_MODEL = ("below 64 KiB", "the message describes one model")
_TICKET = f"{_HASH} bytes per page of the prompt"
_KEYS = (
    f"`--max-keys` (8,192) x {_HASH} bytes: {size(8192 * _HASH)}",
    "page_store.py; a scheduler sends at most 8,192 hashes",
)
_LEASE = ("below 1 KiB", "the message names one lease")
_PAGES = (
    f"{FRAME_PAGES:,} pages; one request with more pages is not divided. A page takes {_HASH} bytes, and 4 bytes per "
    "token if the caller asked for tokens"
)

# By `Service.Method`: bound and enforcer of the request, or of each message of its stream, and of the answer.
RPCS: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "Inference.Generate": (
        ("`--max-body-bytes` (4 MiB)", "the gRPC options of the public port"),
        (
            f"the part of the answer that the client has not read yet. This part has at most "
            f"{MAX_PROMPT_ALTERNATIVES:,} logprobs of the prompt, of about {_PUBLIC_ALTERNATIVE} bytes each "
            f"({size(MAX_PROMPT_ALTERNATIVES * _PUBLIC_ALTERNATIVE)} together). It also has at most "
            f"{MAX_ALTERNATIVES:,} logprobs of the answer",
            f"products.py; {_CHANNEL}",
        ),
    ),
    "Inference.ListModels": (_SMALL, ("64 KiB for each served model name", "the configuration lists the names")),
    "Scheduler.Session": (
        (
            f"{size(SESSION_BYTES)} of entries, and one more entry. An entry is a Handover or a Submit. A Submit has "
            f"4 bytes per token, logit controls, and a ticket with {_TICKET}",
            "session_outgoing.py, `--max-body-bytes` and the model's context",
        ),
        (
            f"{size(PIECE_BYTES)}. A message with one sequence or one ticket ({_TICKET}) may be larger. A message that "
            f"joins several steps has at most {size(MOST_JOINED_BYTES)}",
            "output_split.py, session.py",
        ),
    ),
    "Scheduler.GenerateTokens": (
        ("4 bytes per token of the sequence, and its logit controls", _CHANNEL),
        (f"{size(PIECE_BYTES)}, or more for one sequence", "output_split.py"),
    ),
    "Scheduler.GetModelInfo": (_SMALL, _MODEL),
    "Scheduler.WatchLoad": (_SMALL, ("below 2 KiB", "load_watch.py cuts texts to 500 characters")),
    "Scheduler.WatchPages": (_SMALL, (_PAGES, "page_events.py; page_names.py divides snapshots")),
    "Scheduler.Drain": (_SMALL, _SMALL),
    "Scheduler.GetTicket": (_SMALL, (_TICKET, "the model's context")),
    "Scheduler.SetRole": (_SMALL, _SMALL),
    "Tokenizer.Encode": (
        ("`--max-text-bytes` (16 MiB), in at most `--max-texts` (1,024) texts", "encoder.py"),
        (
            "4 bytes per token: 64 MiB for the longest texts, 16 MiB for a public request",
            f"`max_tokens` of the request; {_CHANNEL}",
        ),
    ),
    "Tokenizer.RenderChat": (
        ("`--max-text-bytes` (16 MiB)", "conversation.py"),
        (
            "4 bytes per token, or the text",
            f"`max_tokens` of the request, the memory limit of the rendering process; {_CHANNEL}",
        ),
    ),
    "Tokenizer.CompileGrammar": (
        (f"{size(MAX_SOURCE_BYTES)}", "grammar_compiler.py"),
        (f"{size(MAX_GRAMMAR_BYTES)} of canonical text, and warnings", "constraint.py"),
    ),
    "Tokenizer.Tokenize": (
        (size(TOKENIZE_BYTES), "tokenize_stream.py, which sends larger texts by Encode or RenderChat"),
        (
            f"4 bytes per token, at most {size(4 * TOKENIZE_BYTES)}; or the rendered text",
            "the size of the request; the chat template",
        ),
    ),
    "Tokenizer.Detokenize": (
        (f"{size(MESSAGE_BYTES)} of tokens, and the stop strings of one sequence", "rows_codec.py, stream_outgoing.py"),
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
    "Tokenizer.GetTokenizerInfo": (_SMALL, ("below 4 KiB", "the message describes one tokenizer")),
    "Worker.Load": (_SMALL, _MODEL),
    "Worker.Run": (
        (
            f"{size(MAX_START_BYTES)} of sequences to start, or one larger sequence. In addition, {_HASH + 4} bytes "
            "per page to transfer and 12 bytes per allocated page",
            "admission.py, the number of pages on the device",
        ),
        (
            f"{size(MAX_SCORE_BYTES)} of prompt logprobs. In addition, 17 bytes per token, and {_ALTERNATIVE} bytes "
            f"per logprob (a token has at most 256). Several Reports are joined into one of up to {size(REPORT_BYTES)}",
            "step_schedule.py, `--max-num-seqs`, report_bundle.py",
        ),
    ),
    "Worker.GetStatus": (_SMALL, _SMALL),
    "Peer.Connect": (
        (size(TUNNEL_BYTES), "tunnel_stream.py"),
        (size(TUNNEL_BYTES), "tunnel_stream.py"),
    ),
    "KvStore.LookupAndPin": (
        _KEYS,
        ("16 bytes per page if the response contains the places of the pages; else below 1 KiB", "`--max-keys`"),
    ),
    "KvStore.BeginPut": (_KEYS, ("4 bytes per page", "`--max-keys`")),
    "KvStore.Put": ((f"{size(PUT_FRAME_BYTES)} of a page", f"the worker that sends the page; {_CHANNEL}"), _SMALL),
    "KvStore.CommitPut": (_LEASE, _SMALL),
    "KvStore.Get": (("4 bytes per page", "`--max-keys`"), (f"{size(PUT_FRAME_BYTES)} of a page", "servicer.py")),
    "KvStore.Attach": (_LEASE, ("16 bytes per page", "`--max-keys`")),
    "KvStore.Check": (_LEASE, _SMALL),
    "KvStore.Renew": (_LEASE, _SMALL),
    "KvStore.Release": (("18 bytes per lease", "the number of leases of a scheduler, `--max-leases` (4,096)"), _SMALL),
    "KvStore.Watch": (_SMALL, (_PAGES, "page_events.py, page_watch.py")),
    "KvStore.Stats": (_SMALL, ("below 4 KiB", "a store has three tiers")),
}

_NONE = "none"
_INDICES = "4 bytes per page"
_BODY = f"{size(BODY_BYTES)} of a page's body"
# Purpose and payload of each kind of frame on data connections.
DATA_FRAMES: Mapping[FrameKind, tuple[str, str]] = {
    FrameKind.GET: ("asks for pages of a lease", _INDICES),
    FrameKind.PUT: ("contains a part of a page to store", _BODY),
    FrameKind.DAMAGED: ("reports to the sender of a page that the page arrived damaged", _NONE),
    FrameKind.MAP: ("asks for the file descriptor of the other side's memory (Unix sockets only)", _NONE),
    FrameKind.LEND: ("passes a file descriptor of the sender's memory (Unix sockets only)", _NONE),
    FrameKind.TAKE: ("says that a page to store lies in the memory that LEND passed", _NONE),
    FrameKind.DONE: ("says that the reader needs no more pages of a lease", _NONE),
    FrameKind.LOCATE: ("asks where pages lie in the GPU memory that a ticket names", _NONE),
    FrameKind.AGENT: ("asks for the address of the other side's agent of NIXL, a library for RDMA", _NONE),
    FrameKind.SHOW: ("asks for pages of a lease over NIXL", _INDICES),
    FrameKind.PAGE: ("answers GET with a part of a page", _BODY),
    FrameKind.END: ("ends the answer to GET, DAMAGED, MAP, LEND, DONE or SHOW", _NONE),
    FrameKind.TAKEN: ("says that the receiver of PUT, TAKE or SHOWN has the pages", _NONE),
    FrameKind.REFUSED: ("answers a frame with an error", "the code of the error"),
    FrameKind.ALIVE: ("says that the answer to an earlier frame will still come", _NONE),
    FrameKind.PLACED: (
        "answers LOCATE and AGENT",
        "4 bytes per page, for at most 4,096 pages; or the metadata of a NIXL agent",
    ),
    FrameKind.SHOWN: (
        "answers GET and SHOW with the places of pages in shared memory",
        "136 bytes per page, for at most four pages",
    ),
}
# Purpose and payload of each kind of frame between a worker's engine and its KV transfer agent.
AGENT_FRAMES: Mapping[AgentFrameKind, tuple[str, str]] = {
    AgentFrameKind.SETUP: ("configures the agent", "JSON"),
    AgentFrameKind.MOVE: ("starts a transfer", f"{_HASH + 4} bytes per page"),
    AgentFrameKind.FILLED: ("says that pages to send lie in the ring", "8 bytes per slot of the ring"),
    AgentFrameKind.RETURNED: ("says that the engine has read pages from the ring", "4 bytes per slot of the ring"),
    AgentFrameKind.CANCEL: ("cancels all earlier transfers", _NONE),
    AgentFrameKind.PING: ("asks whether the agent is alive", _NONE),
    AgentFrameKind.CUT: ("cancels one transfer", _NONE),
    AgentFrameKind.OFFERED: ("says how many pages of an export are complete on the device", "4 bytes"),
    AgentFrameKind.FETCHED: ("says how many pages the engine has read from another worker's memory", "4 bytes"),
    AgentFrameKind.READY: ("says that the agent has started", _NONE),
    AgentFrameKind.WANTED: ("asks the engine to put pages into the ring", "4 bytes per page"),
    AgentFrameKind.ARRIVED: ("says that received pages lie in the ring", "8 bytes per slot of the ring"),
    AgentFrameKind.RELEASED: ("says that the agent has sent pages from the ring", "4 bytes per slot of the ring"),
    AgentFrameKind.ENDED: ("says that a transfer has ended, and how many pages are complete", "8 bytes"),
    AgentFrameKind.PONG: ("answers PING", _NONE),
    AgentFrameKind.FETCH: ("asks the engine to read pages from another worker's memory", "4 bytes per page"),
    AgentFrameKind.KEPT: ("says how many of the FETCHED pages are valid", "4 bytes"),
}
# Frames between a worker's engine and its matcher: the purpose of each kind, and its payload.
MATCHER_FRAMES: Mapping[MatcherFrameKind, tuple[str, str]] = {
    MatcherFrameKind.SETUP: ("configures the matcher", "JSON"),
    MatcherFrameKind.OPEN: (
        "starts a sequence in a mask slot",
        f"the sequence's grammar, at most {size(MAX_GRAMMAR_BYTES)}; 4 bytes per output token",
    ),
    MatcherFrameKind.TOKENS: ("says which tokens a step has sampled", "16 bytes per token"),
    MatcherFrameKind.CLOSE: ("ends a sequence, and frees its mask slot", _NONE),
    MatcherFrameKind.AWAIT: ("asks to be told when the mask of a position is there", "4 bytes"),
    MatcherFrameKind.PING: ("asks whether the matcher is alive", _NONE),
    MatcherFrameKind.READY: ("says that the matcher has started", _NONE),
    MatcherFrameKind.OPENED: ("says that the first mask of a sequence is in the shared memory", "4 bytes"),
    MatcherFrameKind.FAILED: ("says that a grammar cannot be applied", "the cause, at most 500 characters"),
    MatcherFrameKind.TOO_SLOW: ("says that a grammar's masks take too long", "the cause"),
    MatcherFrameKind.MASKED: ("says that the awaited mask is in the shared memory", _NONE),
    MatcherFrameKind.PONG: ("answers PING", _NONE),
}
# ZeroMQ messages and Redis values: name, limit and enforcer.
ZMQ = (
    (
        "events: topic, number (8 bytes), batch of changes",
        "256 changes. A change has the pages of one request. A change takes 14 bytes per page and 5 bytes per token",
        "event_pump.py",
    ),
    ("snapshot: topic, number, part of the snapshot", "1,024 pages", "page_names.py"),
    (
        "request for missed events: client, empty frame, number",
        "8 bytes; the scheduler drops malformed requests",
        "zmq_publisher.py",
    ),
    (
        "missed events: client, empty frame, number, batch",
        "as for events; the scheduler keeps the last `buffer_steps` (10,000) batches",
        "zmq_publisher.py",
    ),
)
REDIS = (
    ("`quire:endpoint:SERVICE:INSTANCE`", "below 1 KiB", "the value is one address; it expires after `ttl_s`"),
    ("`quire:instances:SERVICE`", "the names of all instances", "names of instances that have ended are removed"),
    (
        "`quire:life`, by which services notice that Redis has lost its data",
        "below 100 bytes",
        "the value is one random number",
    ),
    (
        "`quire:limit:{TENANT}:requests`, `:tokens`",
        "two numbers, and one for each router",
        "the key expires when the tenant's limit is free again",
    ),
    (
        "`quire:response:TENANT:ID`",
        "`--responses-max-mib` (64 MiB)",
        "store.py; the key expires after `--responses-ttl-s`",
    ),
    (
        "`quire:page:` with namespace, hash and KV group (a group of layers with the same kind of KV data)",
        "a page of `--max-page-bytes` (256 MiB) and 128 bytes",
        "put_manager.py; the key expires after `--redis-ttl-s`",
    ),
)


def methods() -> dict[str, MethodDescriptor]:
    """Return every RPC of the contracts, by `Service.Method`."""
    services = [service for contract in CONTRACTS for service in contract.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}.{method.name}": method for service in services for method in service.methods}


def document() -> str:
    """Return the whole page. Raises KeyError for a message without a row."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Messages between services, and their limits"
    yield ""
    limit = size(MAX_MESSAGE_BYTES)
    yield f"This page is for contributors. A gRPC message has at most {limit}. Many requests share one gRPC stream, and"
    yield "a larger message ends its stream and all requests on the stream. So services divide or refuse large"
    yield "content."
    yield ""
    yield "The tables show the largest size of each message. The column *ensured by* says why no message is larger. The"
    yield "column names a file of the code, an option, or a property of the message."
    yield ""
    yield "`python -m tools.messages_table` generates this page from the protobuf contracts and from constants."
    yield ""
    yield "## RPCs"
    yield ""
    yield "Each RPC has two rows: one for its request, and one for its response. The column *at most* shows the largest"
    yield "size of a message. For a stream, this limit holds for each message of the stream."
    yield ""
    yield "| RPC | message | at most | ensured by |"
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
    payload = size(MAX_PAYLOAD_BYTES)
    yield "Workers and kvstores exchange KV pages over TCP or Unix connections, in frames. A frame has a head of"
    yield f"{FRAME_BYTES} bytes and a payload of at most {payload}. A larger frame ends the connection with an error"
    yield "(`quire_common/kv_data/frame.py`)."
    yield ""
    yield "| frame | purpose | payload |"
    yield "|---|---|---|"
    for kind in FrameKind:
        yield "| {} | {} | {} |".format(kind.name, *DATA_FRAMES[kind])
    yield ""
    yield "## Frames between a worker and its KV transfer agent"
    yield ""
    yield "The KV transfer agent is a helper process that sends and receives pages for the worker. Worker and agent"
    yield "pass pages through shared memory, the *ring*. All other messages between them are *frames*, which they"
    yield "send over a socket. A frame says for example which pages to transfer. It has at most"
    yield f"{size(AGENT_FRAME_BYTES)} (`quire_worker/side_process/frames.py`)."
    yield ""
    yield "| frame | purpose | payload |"
    yield "|---|---|---|"
    for agent_frame_kind in AgentFrameKind:
        yield "| {} | {} | {} |".format(agent_frame_kind.name, *AGENT_FRAMES[agent_frame_kind])
    yield ""
    yield "## Frames between a worker and its matcher"
    yield ""
    yield "The *matcher* consists of one or more helper processes of the worker, and applies grammars. For each"
    yield "sequence with a grammar, the matcher writes masks into a *mask slot* in shared memory. A mask tells"
    yield "which tokens the sequence may have next. Worker and matcher exchange these frames of at most"
    yield f"{size(AGENT_FRAME_BYTES)} (`quire_worker/side_process/frames.py`):"
    yield ""
    yield "| frame | purpose | payload |"
    yield "|---|---|---|"
    for matcher_frame_kind in MatcherFrameKind:
        yield "| {} | {} | {} |".format(matcher_frame_kind.name, *MATCHER_FRAMES[matcher_frame_kind])
    for title, intro, rows in (
        (
            "KV events over ZeroMQ",
            "With `--kv-events-config`, a scheduler publishes the changes of its prefix cache in vLLM's format. This "
            "table has the frames of each ZeroMQ message.",
            ZMQ,
        ),
        ("Redis", "These are the keys that Quire stores in Redis.", REDIS),
    ):
        yield ""
        yield f"## {title}"
        yield ""
        yield intro
        yield ""
        yield f"| {'key' if rows is REDIS else 'message'} | at most | ensured by |"
        yield "|---|---|---|"
        for row in rows:
            yield "| {} | {} | {} |".format(*row)


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
