"""The TLS files of a local stack, in a folder that `quire certs` made: certificates, and the key for the MACs of KV
pages. This module makes the services' flags for these files, and opens channels to the services. The supervisor and the
commands connect with the identity `operator`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

SERVER_NAME = "{}.quire.internal"
PUBLIC_CA = "public-ca.pem"
PAGE_MAC_KEY = "page_mac.key"
# A name in the public certificate, by which programs of this host verify it.
PUBLIC_NAME = "localhost"
_CA = "ca.pem"
_OPERATOR = "operator"
_DIRECT = ("grpc.enable_http_proxy", 0)


def check_folder(folder: str, services: Sequence[str]) -> None:
    """Raise InvalidArgument, naming the first missing file, if the folder lacks a certificate or key that a stack of
    these services needs."""
    pairs = [f"{name}.{kind}" for name in (*services, _OPERATOR, "public") for kind in ("pem", "key")]
    missing = [name for name in (_CA, PUBLIC_CA, *pairs) if not (Path(folder) / name).is_file()]
    if missing:
        raise InvalidArgument(
            "TLS_FOLDER",
            f"The folder {folder} has no {missing[0]}.",
            f"`quire certs {folder}` makes all certificates of a stack.",
            param="tls_folder",
        )


def service_flags(folder: str, service: str) -> dict[str, str]:
    """Return the flags, with absolute paths, that give a service its certificate, key and authority. The router also
    gets the public certificate. If the folder has a key for the MACs of pages, the worker and the kvstore get this
    key."""
    flags = {"tls-cert": f"{service}.pem", "tls-key": f"{service}.key", "tls-ca": _CA}
    if service == "router":
        flags |= {"ssl-certfile": "public.pem", "ssl-keyfile": "public.key"}
    if service in ("worker", "kvstore") and (Path(folder) / PAGE_MAC_KEY).is_file():
        flags["page-mac-key-file"] = PAGE_MAC_KEY
    return {flag: str(Path(folder).absolute() / name) for flag, name in flags.items()}


def sync_channel(address: str, service: str, folder: str) -> grpc.Channel:
    """Open a channel to a service of this host, never through a proxy of the environment. With a `folder`, the channel
    uses TLS with the operator's certificate; if `folder` is empty, no TLS. Raises NotFound for a file that cannot be
    read."""
    import grpc

    if not folder:
        return grpc.insecure_channel(address, [_DIRECT])
    return grpc.secure_channel(address, _credentials(folder), [_DIRECT, _verified(service)])


def aio_channel(
    address: str, service: str, folder: str, options: Sequence[tuple[str, int | str]] = ()
) -> grpc.aio.Channel:
    """Open an asyncio channel to a service, with these options. With a `folder`, it uses TLS with the operator's
    certificate; if `folder` is empty, no TLS. Raises NotFound for a file that cannot be read."""
    import grpc

    if not folder:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, _credentials(folder), [*options, _verified(service)])


def _credentials(folder: str) -> grpc.ChannelCredentials:
    """Return TLS credentials with the folder's authority and the operator's certificate and key. Raises NotFound for a
    file that cannot be read."""
    import grpc

    try:
        ca, key, cert = ((Path(folder) / name).read_bytes() for name in (_CA, f"{_OPERATOR}.key", f"{_OPERATOR}.pem"))
    except OSError as error:
        raise NotFound(
            "TLS_FILE",
            f"Cannot read {error.filename}: {error.strerror}.",
            "`quire certs` makes the certificates of a stack.",
        ) from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _verified(service: str) -> tuple[str, str]:
    """Return the channel option with which gRPC checks the certificate for the service's name, not for its address."""
    return "grpc.ssl_target_name_override", SERVER_NAME.format(service)
