"""Decides which peer may call which RPC, under mutual TLS.

The table `CALLERS` has one row for each RPC of each server. An RPC without a row is refused for every caller. This
module sees certificates only through gRPC's auth context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from quire_common.errors import PermissionDenied

# Takes "/package.Service/Method" and the auth context of the call. Raises PermissionDenied.
CallerCheck = Callable[[str, Mapping[str, Iterable[bytes]]], None]

ROUTER: Final = "router"
TOKENIZER: Final = "tokenizer"
SCHEDULER: Final = "scheduler"
WORKER: Final = "worker"
KVSTORE: Final = "kvstore"
# A person or a script that administers the stack. No service has this identity.
OPERATOR: Final = "operator"
# A program that collects metrics.
METRICS: Final = "metrics"
IDENTITIES: Final = (ROUTER, TOKENIZER, SCHEDULER, WORKER, KVSTORE, OPERATOR, METRICS)
# Over HTTP, on the port of `--metrics-listen`.
METRICS_READERS: Final = frozenset({METRICS, OPERATOR})
# The port on which a worker serves pages to other workers. Its certificate is the worker's.
PEER: Final = "peer"

# RPCs that change a service, or reveal tenants' requests. The audit log has each call.
ADMIN_RPCS: Final = frozenset(
    {
        "quire.v1.Scheduler/Drain",
        "quire.v1.Scheduler/SetRole",
        "vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
    }
)

# Anybody, also without a certificate: the API key decides.
PUBLIC: Final = frozenset({"anybody"})

CALLER_NOT_ALLOWED: Final = "CALLER_NOT_ALLOWED"
_TRUST_DOMAIN: Final = "spiffe://quire/"
_DNS_SUFFIX: Final = ".quire.internal"
# gRPC's name for the URIs among a certificate's subject alternative names.
_URIS: Final = "peer_uri"

_HEALTH = ("grpc.health.v1.Health/Check", "grpc.health.v1.Health/List", "grpc.health.v1.Health/Watch")
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_VLLM_ENGINE = (
    "Generate",
    "Embed",
    "HealthCheck",
    "FlushCache",
    "StartProfile",
    "StopProfile",
    "Abort",
    "GetModelInfo",
    "GetServerInfo",
    "GetLoads",
    "GetTokenizer",
    "SubscribeKvEvents",
)


def _rows(service: str, **callers: str) -> dict[str, frozenset[str]]:
    """Return the rows of the methods of a gRPC service. Each method has its callers, separated by spaces."""
    return {f"{service}/{method}": frozenset(names.split()) for method, names in callers.items()}


_INTERNAL = {rpc: frozenset(IDENTITIES) for rpc in _HEALTH} | {_REFLECTION: frozenset({OPERATOR})}

CALLERS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    ROUTER: {
        "quire.v1.Inference/Generate": PUBLIC,
        "quire.v1.Inference/ListModels": PUBLIC,
        **{f"vllm.grpc.engine.VllmEngine/{method}": PUBLIC for method in _VLLM_ENGINE},
        **dict.fromkeys((*_HEALTH, _REFLECTION), PUBLIC),
    },
    TOKENIZER: _INTERNAL
    | _rows(
        "quire.v1.Tokenizer",
        Encode="router",
        RenderChat="router",
        Tokenize="router",
        CompileGrammar="router",
        Detokenize="router",
        Decode="router",
        GetTokenBytes="router",
        GetTokenizerInfo="router operator",
    ),
    SCHEDULER: _INTERNAL
    | _rows(
        "quire.v1.Scheduler",
        Session="router",
        GenerateTokens="operator",
        GetModelInfo="router operator",
        WatchLoad="router operator",
        WatchPages="router operator",
        Drain="router operator",
        GetTicket="router",
        SetRole="router operator",
    ),
    WORKER: _INTERNAL
    | _rows("quire.v1.Worker", Load="scheduler operator", Run="scheduler", GetStatus="scheduler operator"),
    PEER: _rows("quire.v1.Peer", Connect="worker"),
    KVSTORE: _INTERNAL
    | _rows(
        "quire.v1.KvStore",
        LookupAndPin="scheduler worker",
        BeginPut="worker",
        Put="worker",
        CommitPut="worker",
        Get="worker",
        Attach="worker",
        Check="worker",
        Renew="scheduler worker",
        Release="scheduler worker",
        Watch="router",
        Stats="worker router operator",
    ),
}


def server_name(service: str) -> str:
    """Return the DNS name that the certificate of every server of this service contains, wherever it listens."""
    return service + _DNS_SUFFIX


def identity_uri(identity: str) -> str:
    """Return the URI by which a certificate names its holder."""
    return _TRUST_DOMAIN + identity


def identity_of(auth_context: Mapping[str, Iterable[bytes]]) -> str | None:
    """Return the identity that the peer's certificate names. None: it has no certificate, or its certificate does not
    name exactly one identity."""
    uris = [uri.decode(errors="replace") for uri in auth_context.get(_URIS, ())]
    names = [uri.removeprefix(_TRUST_DOMAIN) for uri in uris if uri.startswith(_TRUST_DOMAIN)]
    return names[0] if len(names) == 1 else None


def caller_check(server: str) -> CallerCheck:
    """Return a function that checks each call of a server by the table CALLERS. `server` is a key of CALLERS. The
    function lets everyone call an RPC whose row is PUBLIC, also without a certificate. It raises PermissionDenied for
    another RPC unless the caller has a certificate whose identity may call it, and for an RPC without a row."""
    rows = CALLERS[server]

    def check(path: str, auth_context: Mapping[str, Iterable[bytes]]) -> None:
        """Raise PermissionDenied unless the RPC of `path` is public, or its row of the table names the identity in the
        peer's certificate."""
        rpc = path.lstrip("/")
        allowed = rows.get(rpc)
        if allowed == PUBLIC:
            return
        caller = identity_of(auth_context)
        if allowed is None or caller not in allowed:
            raise _refusal(server, rpc, caller, allowed)

    return check


def _refusal(server: str, rpc: str, caller: str | None, allowed: Iterable[str] | None) -> PermissionDenied:
    """Return the error for a call that the table does not allow. It names the caller and the RPC; its fix names the
    URIs that may call the RPC, or says that the RPC has no row."""
    shown = (
        f"The caller {identity_uri(caller)}" if caller is not None else "A caller whose certificate names no identity"
    )
    if allowed is None:
        fix = "Add a row for this RPC to quire_common/identity/callers.py."
    else:
        fix = f"Call with a certificate that has the URI {' or '.join(map(identity_uri, sorted(allowed)))}."
    return PermissionDenied(CALLER_NOT_ALLOWED, f"{shown} may not call {rpc} of the {server}.", fix)
