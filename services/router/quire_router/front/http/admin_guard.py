"""Guards administration of a router without API keys: programs on its own machine have access, web pages do not.

If the router has keys, the edge has already checked that the request's key has the scope `admin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire_common.errors import PermissionDenied
from quire_common.identity.exposure import is_loopback

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from quire_router.api_keys import ApiKeys

_GIVE_A_KEY = "Give the router a key with the scope admin in --api-key-file."


def check_administrator(request: HTTPConnection, keys: ApiKeys, *, own_name: bool = False) -> None:
    """Raise PermissionDenied unless there are keys, or the request comes from a program of this machine. That is a
    loopback address, with neither an `Origin` header nor a proxy's `Forwarded` or `X-Forwarded-For`.

    A browser sends `Origin` with each POST, and with each request to another origin. It sends none with a GET to the
    page's own origin, and the owner of a domain can point it at this machine (DNS rebinding). `own_name`: the Host
    header must be a loopback address or `localhost`, so that other pages cannot send a GET either.
    """
    if keys:
        return
    if "origin" in request.headers:
        raise _refused("Web pages may not administrate a router without keys.")
    proxied = "forwarded" in request.headers or "x-forwarded-for" in request.headers
    if proxied or request.client is None or not is_loopback(request.client.host):
        raise _refused("Without keys, a router is administrated from its own machine alone.")
    if own_name and not _is_own_name(request.headers.get("host", "")):
        raise _refused("Without keys, a router is administrated by an address of its own machine alone.")


def _is_own_name(host: str) -> bool:
    """Whether a Host header names this machine by a loopback address or as localhost."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


def _refused(cause: str) -> PermissionDenied:
    return PermissionDenied("ADMIN_NEEDS_KEY", cause, _GIVE_A_KEY)
