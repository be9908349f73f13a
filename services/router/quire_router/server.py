"""RouterService: the router as a service. It makes the router's parts, and starts and ends them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.v1 import inference_pb2, inference_pb2_grpc
from quire_common.config import split_address
from quire_common.discovery import make_discovery
from quire_common.errors import ConfigError, PermissionDenied
from quire_common.identity.exposure import is_loopback
from quire_common.telemetry.audit import bind_key_name
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.metrics import registry
from quire_common.telemetry.vllm_names import add_compatible_names
from quire_router import metrics
from quire_router.api_keys import load_api_keys
from quire_router.config import check_body_memory, refuse_plain_ports
from quire_router.front.grpc.smg.parts import SmgParts
from quire_router.front.http.admin import AdminPort
from quire_router.front.http.bodies.body_parser import BodyParser
from quire_router.front.http.console.console import Console
from quire_router.front.http.cors import make_cors
from quire_router.front.http.edge import Edge
from quire_router.front.http.responses.background import BackgroundRuns
from quire_router.front.http.responses.store import make_store
from quire_router.front.http.routes import make_routes
from quire_router.front.http.server import HttpServer, check_port
from quire_router.front.http.status import StatusRoutes
from quire_router.front.parameters.request_limits import Limits
from quire_router.http_workers import HttpWorkers, check_shared_limits
from quire_router.kv_transfer.ticket_manager import TicketManager
from quire_router.kv_transfer.transfers import Transfers
from quire_router.limits.concurrency import ConcurrencyLimits
from quire_router.limits.rate_limits import RateLimits
from quire_router.limits.redis_backoff import RedisBackoff
from quire_router.limits.shared_buckets import SharedBuckets
from quire_router.limits.shared_concurrency import SharedConcurrency
from quire_router.placement.placement_service import PlacementService
from quire_router.principal import ADMIN, KeyLimits
from quire_router.replicas.chooser import Chooser
from quire_router.replicas.fleet import Fleet
from quire_router.replicas.migration import Migration
from quire_router.replicas.pending_sequences import PendingSequences
from quire_router.requests.admission import Admission
from quire_router.requests.beam_search import BeamSearch
from quire_router.requests.catalog import Catalog
from quire_router.requests.encoder import Encoder
from quire_router.requests.pipeline import Pipeline
from quire_router.sequences.handles import HandleCounter
from quire_router.servicer import InferenceServicer
from quire_router.text.detokenize_stream import DetokenizeStream
from quire_router.text.token_bytes import TokenBytes
from quire_router.text.tokenizer_client import TokenizerClient
from quire_router.text.tokenizer_pool import TokenizerPool
from quire_router.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import grpc

    from quire_common.serving.server import BoundServer
    from quire_router.config import RouterConfig
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState

# Of gRPC, what /health is of HTTP.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
# They tell what other tenants asked.
_ADMIN_CALLS = ("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",)
log = get_logger(__name__)


class RouterService:
    """Implements AioService. HTTP and gRPC are open at once; `start` returns when the router could answer a first
    request. The constructor makes all parts, and binds the HTTP and admin ports. It raises ConfigError for a
    configuration that cannot work, except for what only `start` checks."""

    name = "router"

    def __init__(self, config: RouterConfig, bound: BoundServer) -> None:
        self._config = config
        add_compatible_names(registry, config.metrics_compat, self.name)
        self._set_serving = bound.set_serving
        self._keys = load_api_keys(
            config.api_key,
            config.api_key_file,
            KeyLimits(config.requests_per_minute, config.tokens_per_minute),
            check=lambda keys: check_shared_limits(config, limited=keys.limited),
        )
        self._needs_admin_key = not (config.insecure or is_loopback(split_address(config.listen, "--listen")[0]))
        bound.guard_calls(self._check_call)
        backoff, redis = RedisBackoff(), (config.redis, config.redis_file)
        self._rates = RateLimits(SharedBuckets(*redis) if config.redis else None, backoff)
        self._concurrency = ConcurrencyLimits(SharedConcurrency(*redis) if config.redis else None, backoff)
        self._changed = asyncio.Event()
        self._watchdog = Watchdog(config.replica_timeout_s, config.tokenizer_timeout_s)
        self.pool = TokenizerPool(config, self._on_change)
        self.fleet = Fleet(config, self._detokenizer, bound.instance, self._watchdog, self._lost, self._on_fleet)
        self._pending = PendingSequences(self._detokenizer)
        handles = HandleCounter()
        self._placement = PlacementService(config, self.fleet.table, self.fleet.row_of)
        self._transfers = Transfers()
        chooser = Chooser(self.fleet, self._placement.placer)
        self._migration = Migration(config, chooser, handles, self._pending, self._transfers)
        metrics.open_transfers.set_function(lambda: len(self._transfers))
        metrics.detokenize_backlog.set_function(lambda: self.fleet.backlog)
        self.admission = Admission(config.max_concurrent_requests)
        self._catalog = Catalog(config.served_model_name, self.fleet.models)
        tokenizer = TokenizerClient(self.pool)
        token_bytes = TokenBytes(tokenizer)
        encoder = Encoder(tokenizer)
        self._pipeline = Pipeline(
            self._catalog,
            encoder,
            self._migration,
            handles,
            self.admission,
            self._concurrency,
            token_bytes,
            self._rates.charge,
            ticket_manager=TicketManager(
                self.fleet.find, self._transfers, self._migration, config.kv_transfer_lease_s, config.replica_timeout_s
            ),
            share_prefix_across_keys=config.share_prefix_across_keys,
        )
        self._beams = BeamSearch(self._pipeline, encoder, token_bytes)
        self._bodies = BodyParser(Limits(config.max_n, config.max_logprobs), config.max_body_bytes)
        self._status = StatusRoutes(self._catalog, self.fleet, self.pool, self.admission, self._keys)
        with_metrics = config.metrics_on_main or not self._keys
        self._responses = make_store(config, self._keys.kept_bytes)
        self._background = BackgroundRuns(self._responses) if self._responses is not None else None
        self._console = Console(
            config,
            bound.instance,
            self._keys,
            self.fleet,
            self.pool,
            self.admission,
            self._pipeline.live,
            self._catalog,
            self._placement,
            lambda: len(self._transfers),
            self._on_change,
        )
        self.routes = make_routes(
            config,
            self._pipeline,
            self._beams,
            self._bodies,
            self._catalog,
            tokenizer,
            token_bytes,
            self._status,
            self._background,
            with_metrics=with_metrics,
            console=self._console.routes,
        )
        refuse_plain_ports(config)
        check_body_memory(config)
        if config.http_workers > 1 and not config.http_worker:
            check_port(config.host, config.port, "port")
        edge = Edge(self.routes, self._keys, self._rates, config.max_body_bytes, cors=make_cors(config))
        self.http = HttpServer(
            edge,
            config.host,
            config.port,
            config.ssl_certfile,
            config.ssl_keyfile,
            stall_s=config.client_stall_s,
            shared=config.http_workers > 1,
            max_connections=config.max_connections,
        )
        self._workers = HttpWorkers(config, bound.instance, self.http.port)
        self.admin = AdminPort(config, self._keys, self._rates, self.admission, self._status, self._on_change)
        static = {"scheduler": config.schedulers, "tokenizer": config.tokenizers, "kvstore": config.kvstores}
        self._discovery = make_discovery(config.discovery, static, config.discovery_file)
        self._tasks: list[asyncio.Task[None]] = []
        bound.when_leaving(self._leave)  # last: a router that could not be made must not be kept alive by this

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Register quire.v1.Inference at the server and, if configured, SMG's service. Returns their full names."""
        limits = Limits(self._config.max_n, self._config.max_logprobs)
        servicer = InferenceServicer(
            self._pipeline,
            self._beams,
            self._catalog,
            self._keys,
            limits,
            self._config,
            self._watchdog,
            self._rates,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        names = [inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name]
        if self._config.vllm_grpc:
            from quire_router.front.grpc.smg.servicer import add_vllm_engine  # its contracts take time to load

            names.append(add_vllm_engine(server, self._smg_parts(limits)))
        return names

    def _smg_parts(self, limits: Limits) -> SmgParts:
        """Collect the parts of the router that SMG's service calls."""
        return SmgParts(
            self._pipeline,
            self._catalog,
            self.fleet,
            self.admission,
            self._keys,
            self._rates,
            limits,
            self._config,
            self._watchdog,
        )

    async def start(self) -> None:
        """Open HTTP and the admin port, start the other HTTP processes, follow discovery, and return when a scheduler
        and a tokenizer are ready and admission is not paused. If there are several HTTP processes, all but the first
        open HTTP only then. Raises ConfigError for TLS files that cannot be used, and for a configuration that
        `_check_peers` refuses."""
        if not self._config.http_worker:
            await self._open_http()
        await self.admin.start()
        self._check_peers()
        self._workers.start()
        self._tasks = [
            asyncio.create_task(self._watch_schedulers(), name="discovery of schedulers"),
            asyncio.create_task(self._watch_tokenizers(), name="discovery of tokenizers"),
            asyncio.create_task(self._watch_kvstores(), name="discovery of kvstores"),
            asyncio.create_task(self._placement.run(), name="page index"),
            asyncio.create_task(self._watchdog.run(), name="watchdog"),
            asyncio.create_task(self._pending.run(), name="pending sequences"),
        ]
        while not self._status.ready:
            await self._changed.wait()
            self._changed.clear()
        if self._config.http_worker:  # the first says meanwhile what is being waited for
            await self._open_http()

    async def _open_http(self) -> None:
        """Open the HTTP port and log its address."""
        await self.http.start()
        log.info("http", url=f"{self.http.scheme}://{self.http.address}")

    def _check_peers(self) -> None:
        """Raise ConfigError if static or DNS discovery has no address of a scheduler or of a tokenizer, or if the
        router could have several schedulers with --vllm-grpc."""
        if self._config.vllm_grpc and (self._config.discovery != "static" or len(self._config.schedulers) > 1):
            raise ConfigError(
                "NOT_ONE_SCHEDULER",
                "--vllm-grpc speaks for one engine, and this router may have several.",
                "Give one address in --schedulers, with static discovery; run a router per engine.",
                param="vllm_grpc",
            )
        for service in ("schedulers", "tokenizers"):
            if self._config.discovery in ("static", "dns") and not getattr(self._config, service):
                raise ConfigError(
                    "NO_PEERS",
                    f"The router has no {service}.",
                    f"Give --{service} host:port[,host:port...], or a registry with --discovery redis://...",
                    param=service,
                )

    @property
    def waiting(self) -> Collection[SequenceState]:
        """Return the sequences that wait for an engine."""
        return self._pending.waiting.values()

    @property
    def background_runs(self) -> int:
        """Return the number of background responses that run, or that the store does not have yet."""
        return len(self._background) if self._background is not None else 0

    def _leave(self) -> None:
        """Report on all routes that this router is not ready, make clients connect again, and let the other HTTP
        processes leave too."""
        self._status.leave()
        self.http.begin_last_answers()
        self._workers.leave()

    async def drain(self, timeout_s: float) -> None:
        """Stop admitting requests, in all HTTP processes, and close idle HTTP connections. Return when all requests and
        the other HTTP processes have ended, or after the timeout."""
        self.http.close_idle()
        await asyncio.gather(self.admission.close(timeout_s), self._workers.drain(timeout_s))

    async def close(self) -> None:
        """Close HTTP, then all tasks and connections to other services. The other HTTP processes end first. Sequences
        without an engine fail."""
        await self._workers.close()
        await self._console.close()
        await self.http.close()
        await self._bodies.close()
        if self._background is not None:
            await self._background.close()
        await self.admin.close()
        self._migration.close()
        self._transfers.close()
        await self._discovery.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._placement.close()
        await self.fleet.close()
        await self.pool.close()
        if self._responses is not None:
            await self._responses.close()
        await self._rates.close()
        await self._concurrency.close()

    def _check_call(self, path: str, metadata: Mapping[str, str]) -> None:
        """Authenticate a gRPC call of any method but health's, which are open. A key needs the scope `inference`. For a
        method that shows other tenants' requests, it needs the scope `admin` in place of that, and its name goes to the
        audit log. If the router has no keys, it accepts all calls, but refuses those of such a method unless the port
        is local or --insecure is given. Raises Unauthenticated for a missing or unknown key, and PermissionDenied for a
        refused call or a missing scope."""
        authorization = metadata.get("authorization", "")
        if path in _ADMIN_CALLS:
            if self._needs_admin_key and not self._keys:
                raise PermissionDenied(
                    "ADMIN_NEEDS_KEY",
                    f"{path.lstrip('/')} shows the requests of all tenants, and this router has no API keys.",
                    "Give --api-key-file a key with the scope `admin`, listen on 127.0.0.1, or give --insecure.",
                )
            bind_key_name(self._keys.name_of(authorization))
            self._keys.authenticate(authorization, ADMIN)
        elif not path.startswith(_OPEN_SERVICE):
            self._keys.authenticate(authorization)

    def _lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """Pass a lost sequence on to the migration, which is made later than the fleet that reports the loss."""
        self._migration.lost(sequence, failure)

    def _detokenizer(
        self, sequences: dict[int, SequenceState], text_ended: Callable[[SequenceState], None]
    ) -> DetokenizeStream:
        return DetokenizeStream(self.pool, self._watchdog, self._config, sequences, text_ended)

    def _on_fleet(self) -> None:
        """Update the readiness after a change of the fleet, and try to place the sequences that wait for an engine."""
        self._on_change()
        self._migration.replicas_changed()

    def _on_change(self) -> None:
        """Wake `start`, and set gRPC's health to the state of /health, because a peer came or went."""
        self._changed.set()
        self._set_serving(self._status.ready)

    async def _watch_schedulers(self) -> None:
        """Pass each new list of schedulers from discovery on to the fleet and to placement, until cancelled."""
        async for endpoints in self._discovery.watch("scheduler"):
            self.fleet.update(endpoints)
            self._placement.update("scheduler", endpoints)

    async def _watch_tokenizers(self) -> None:
        async for endpoints in self._discovery.watch("tokenizer"):
            self.pool.update(endpoints)

    async def _watch_kvstores(self) -> None:
        """Pass each new list of kvstores from discovery on to placement and to the console, until cancelled."""
        async for endpoints in self._discovery.watch("kvstore"):
            self._placement.update("kvstore", endpoints)
            self._console.update_kvstores(endpoints)
