"""Actions of an operator in the console: end a request, drain a replica or change its role, pause this router.

The edge writes each call to the audit log, with the name of the key. Without keys, a browser cannot act: it sends
`Origin` with each POST, and the guard refuses such requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import orjson
from starlette.responses import Response
from starlette.routing import Route

from quire_common.errors import FailedPrecondition, NotFound, as_quire_error
from quire_common.telemetry.audit import bind_subject
from quire_common.telemetry.logs import get_logger
from quire_router.front.http.admin_guard import check_administrator
from quire_router.front.http.body import parse_object, read_json
from quire_router.front.http.console.action_fields import CANCEL, DRAIN, ROLE, ROUTER
from quire_router.front.http.parsing.prompts import required
from quire_router.front.parameters.fields import check_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.requests import Request

    from quire_router.api_keys import ApiKeys
    from quire_router.front.parameters.fields import Field
    from quire_router.replicas.fleet import Fleet
    from quire_router.replicas.replica import Replica
    from quire_router.requests.admission import Admission
    from quire_router.requests.live_generations import LiveGenerations

_MAX_BODY_BYTES = 4096
# A scheduler refuses a call at once. So a call that still runs after this time was accepted.
_REFUSAL_S = 1.5
DONE, UNDER_WAY = "done", "under way"
log = get_logger(__name__)


class ConsoleActions:
    """Endpoints for POST, which check the caller and the body as `_read` does. An action on a request or a replica
    names it as the subject of the audit log's entry. A scheduler's call may still run when the client gets its answer;
    then it goes on alone."""

    def __init__(
        self,
        keys: ApiKeys,
        fleet: Fleet,
        admission: Admission,
        live: LiveGenerations,
        drain_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when the router's readiness may have changed."""
        self._keys = keys
        self._fleet = fleet
        self._admission = admission
        self._live = live
        self._drain_timeout_s = drain_timeout_s
        self._changed = changed
        # An instance has at most one action at a time.
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> list[Route]:
        """Return the routes of all actions."""
        return [
            Route("/console/cancel", self.cancel, methods=["POST"]),
            Route("/console/drain", self.drain, methods=["POST"]),
            Route("/console/role", self.role, methods=["POST"]),
            Route("/console/pause", self.pause, methods=["POST"]),
            Route("/console/resume", self.resume, methods=["POST"]),
        ]

    async def cancel(self, request: Request) -> Response:
        """End a running request of any tenant; the body names it by its number and its request id. A client that
        streams gets the output so far, then an error; another client gets the error alone. Raises NotFound unless this
        process runs such a request."""
        values = await self._read(request, CANCEL)
        number, request_id = required(values, "number"), required(values, "request_id")
        bind_subject(request_id)
        self._live.cancel(number, request_id)
        return _state_response(DONE)

    async def drain(self, request: Request) -> Response:
        """Drain a replica: it refuses new requests and finishes the running ones; those that still run after
        `drain_timeout_s` (0: never) are aborted. Answers `done`, or `under way` if that takes longer than 1.5 s. Raises
        NotFound for an unknown replica, FailedPrecondition while an action that began here goes on at the replica, and
        its scheduler's errors of the first 1.5 s."""
        values = await self._read(request, DRAIN)
        replica = self._replica(required(values, "instance"))
        bind_subject(replica.instance)
        return await self._begin(replica, replica.client.drain(self._drain_timeout_s))

    async def role(self, request: Request) -> Response:
        """Change a replica's role, for which some requests must end; those that still run after `drain_timeout_s` (0:
        never) are aborted. Answers `done`, or `under way` if that takes longer than 1.5 s. Raises NotFound for an
        unknown replica, FailedPrecondition while an action that began here goes on at the replica, and its scheduler's
        errors of the first 1.5 s."""
        values = await self._read(request, ROLE)
        replica, role = self._replica(required(values, "instance")), required(values, "role")
        bind_subject(f"{replica.instance} {role}")
        return await self._begin(replica, replica.client.set_role(role, self._drain_timeout_s))

    async def pause(self, request: Request) -> Response:
        """Make this router process refuse new requests, and report that its readiness changed. Running requests go
        on."""
        await self._read(request, ROUTER)
        self._admission.pause()
        self._changed()
        return _state_response(DONE)

    async def resume(self, request: Request) -> Response:
        """Make this router process admit requests again, and report that its readiness changed."""
        await self._read(request, ROUTER)
        self._admission.resume()
        self._changed()
        return _state_response(DONE)

    async def close(self) -> None:
        """Cancel the calls to schedulers that are under way. A draining replica then still refuses new requests, but
        no longer aborts any after the timeout; a replica whose role was being changed keeps its role."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request: Request, table: Mapping[str, Field]) -> dict[str, Any]:
        """Check the caller, and return the fields of the body, checked by `table`. Raises PermissionDenied as
        `check_administrator` does, InvalidArgument for a body that is not a JSON object of these fields, and TooLarge
        for a body that is too long."""
        check_administrator(request, self._keys, own_name=True)
        return check_fields(parse_object(await read_json(request.scope, request.receive, _MAX_BODY_BYTES)), table)

    def _replica(self, instance: str) -> Replica:
        """Return the replica of this name. Raises NotFound if the fleet has none."""
        replica = self._fleet.find(instance)
        if replica is None:
            raise NotFound(
                "NO_SUCH_REPLICA",
                f"There is no replica {instance!r}.",
                "Use the name of a replica that the console shows.",
            )
        return replica

    async def _begin(self, replica: Replica, call: Coroutine[Any, Any, None]) -> Response:
        """Start a scheduler's call as a task. Answer `done` when the call has ended, or `under way` when it has run for
        1.5 s; then the call goes on alone, and its error is only logged. Raises FailedPrecondition, and does not start
        the call, if a call to this replica is under way. Raises a gRPC error of the first 1.5 s as a QuireError; other
        errors pass on."""
        if replica.instance in self._under_way:
            call.close()
            raise FailedPrecondition(
                "ACTION_UNDER_WAY", f"{replica.instance} is being drained or changed.", "Wait until that has ended."
            )
        task = self._under_way[replica.instance] = asyncio.create_task(call, name=f"console at {replica.instance}")
        task.add_done_callback(lambda _: self._ended(replica.instance, task))
        done, _ = await asyncio.wait((task,), timeout=_REFUSAL_S)
        if not done:
            return _state_response(UNDER_WAY)
        try:
            await task
        except grpc.aio.AioRpcError as error:
            raise as_quire_error(error) from error
        return _state_response(DONE)

    def _ended(self, instance: str, task: asyncio.Task[None]) -> None:
        """Forget an ended call. Log a call that failed, because its client may already have an answer."""
        del self._under_way[instance]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("an action of the console failed", instance=instance, reason=str(error))


def _state_response(state: str) -> Response:
    return Response(orjson.dumps({"state": state}), media_type="application/json")
