"""The router's answers about itself: liveness, readiness with phases, models, version, load, metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from quire_common.telemetry import metrics
from quire_common.version import installed_version
from quire_router.front.http.exchange import exchange_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from quire_router.api_keys import ApiKeys
    from quire_router.replicas.fleet import Fleet
    from quire_router.requests.admission import Admission
    from quire_router.requests.catalog import Catalog, ServedModel
    from quire_router.text.tokenizer_pool import TokenizerPool


class StatusRoutes:
    """Endpoints for GET. None of them waits for another process."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, pool: TokenizerPool, admission: Admission, keys: ApiKeys
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._pool = pool
        self._admission = admission
        self._keys = keys
        self._leaving = False
        self._created = int(time.time())

    @property
    def ready(self) -> bool:
        """Whether clients may send requests: the router could answer one now, and is not about to stop."""
        return self._fleet.ready and self._pool.ready and self._admission.open and not self._leaving

    def leave(self) -> None:
        """Report from now on that the router is not ready."""
        self._leaving = True

    async def livez(self, _request: Request) -> Response:
        """Answer that the process lives."""
        return _json({"live": True})

    async def readyz(self, request: Request) -> Response:
        """Answer with the phase of the router and of each scheduler and tokenizer; the status is 503 while the router
        is not `ready`.

        The route needs no key. If there are keys, callers without a key that has the scope `inference` see phases and
        progress, but no names, addresses or paths.
        """
        schedulers = [
            {
                "instance": replica.instance,
                "role": replica.role,
                "phase": replica.load.phase,
                "progress": round(replica.load.progress, 4),
                "detail": replica.load.detail,
                "session": "open" if replica.session.open else "closed",
                "model": replica.model.name if replica.model else None,
                "running": replica.load.running,
                "waiting": replica.load.waiting,
            }
            for replica in self._fleet.replicas.values()
        ]
        tokenizers = [
            {"instance": peer.instance, "phase": "ready" if peer.healthy else "connecting"}
            for peer in self._pool.peers.values()
        ]
        if not self._keys.admit(exchange_of(request.scope).authorization):
            schedulers = [{name: entry[name] for name in ("phase", "progress")} for entry in schedulers]
            tokenizers = [{"phase": entry["phase"]} for entry in tokenizers]
        body = {
            "ready": self.ready,
            "router": {"phase": "serving" if self._admission.open and not self._leaving else "draining"},
            "schedulers": schedulers,
            "tokenizers": tokenizers,
        }
        return _json(body, 200 if self.ready else 503)

    async def health(self, _request: Request) -> Response:
        """Answer 200 if ready, else 503, without a body, as vLLM does."""
        return Response(status_code=200 if self.ready else 503)

    async def models(self, request: Request) -> Response:
        """Answer with all models that the caller may ask for, in OpenAI's shape."""
        served = self._catalog.served(exchange_of(request.scope).limits)
        return _json({"object": "list", "data": list(map(self._model, served))})

    async def model(self, request: Request) -> Response:
        """Answer with the model that the path names. Raises NotFound for an unknown name, PermissionDenied for a model
        that the key may not use, and Unavailable while no model is known."""
        limits = exchange_of(request.scope).limits
        return _json(self._model(self._catalog.resolve(request.path_params["model"], limits)))

    def _model(self, served: ServedModel) -> dict[str, Any]:
        """Return OpenAI's object of a model, with vLLM's additions: context length, vocabulary size, and the model's
        own name as `root`."""
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "root": served.model.name,
            "parent": None,
            "max_model_len": served.model.max_model_len,
            "vocab_size": served.model.vocab_size,
            "permission": [],
        }

    async def version(self, _request: Request) -> Response:
        """Answer with the version of this router."""
        return _json({"version": installed_version("quire-router")})

    async def load(self, _request: Request) -> Response:
        """Answer with the running, waiting and in-flight requests and open transfers of each scheduler. `server_load`
        is vLLM's name for the number of sequences in flight in this router."""
        schedulers = [
            {
                "instance": replica.instance,
                "role": replica.role,
                "in_flight": replica.in_flight,
                "running": replica.load.running,
                "waiting": replica.load.waiting,
                "max_num_seqs": replica.load.max_num_seqs,
                "open_transfers": replica.load.open_transfers,
            }
            for replica in self._fleet.replicas.values()
        ]
        return _json({"server_load": self._admission.inside, "schedulers": schedulers})

    async def metrics(self, _request: Request) -> Response:
        """Answer with the metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
