"""`quire certs`: certificates for mutual TLS between the services and for the public ports, for development."""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
import socket
from pathlib import Path

from quire.local.service_tls import PAGE_MAC_KEY, SERVER_NAME

HELP = "make an authority and the certificates of all services"
# This package does not import quire_common.identity.callers, which has the same list.
IDENTITIES = ("router", "tokenizer", "scheduler", "worker", "kvstore", "operator", "metrics")
URI = "spiffe://quire/{}"
_HERE = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
# Labels of a DNS name, the first of which may be a wildcard. Names whose last label is a number are no DNS names.
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS_NAME = re.compile(rf"(?!.*\.[0-9]+\Z)(?=.{{1,253}}\Z)(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}", re.IGNORECASE | re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the folder for the files, the names in the public certificate, and the life of certificates in
    days."""
    parser.add_argument("folder", help="where the PEM files are written; an authority that is there is used again")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or address of the public certificate, beside this host's; may be repeated",
    )
    parser.add_argument("--days", type=int, default=90, metavar="N", help="life of certificates (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the authority of the services (`ca.pem`), a new certificate and key for each identity, and a new public
    certificate for this machine's names and each --host, with its own authority (`public-ca.pem`). Authorities that are
    there are used again. Also write a key for the MACs of pages, unless there is one, print the files' names, and
    return exit code 0. Raises InvalidArgument for bad --days, a --host that is neither a DNS name nor an IP address,
    authority files that cannot be read or do not fit together, or a folder that cannot be written. Bad --days and a bad
    --host change no file. Raises FailedPrecondition without the package cryptography."""
    from quire.errors import FailedPrecondition, InvalidArgument

    try:
        from quire.cli.credentials.authority import Authority
    except ImportError as error:
        raise FailedPrecondition(
            "CRYPTOGRAPHY_MISSING", "`quire certs` needs the package cryptography.", "pip install 'cryptography>=44'"
        ) from error
    if not 1 <= args.days <= _AUTHORITY_DAYS:
        raise InvalidArgument("BAD_VALUE", f"--days is {args.days}.", f"Give 1 to {_AUTHORITY_DAYS}.", param="days")
    for host in args.host:
        if not _is_host(host):
            raise InvalidArgument(
                "BAD_VALUE",
                f"--host {host!r} is not a host name.",
                "Give names like api.example.org or *.example.org, or IP addresses.",
                param="host",
            )
    folder = Path(args.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        services = Authority.in_folder(folder, "ca", _AUTHORITY_DAYS)
        for identity in IDENTITIES:
            services.issue_identity(identity, URI.format(identity), SERVER_NAME.format(identity), args.days)
        hosts = dict.fromkeys((*_HERE, *filter(_is_host, [socket.gethostname()]), *args.host))
        Authority.in_folder(folder, "public-ca", _AUTHORITY_DAYS).issue_public("public", list(hosts), args.days)
        _write_page_mac_key(folder / PAGE_MAC_KEY)
    except OSError as error:
        raise InvalidArgument(
            "FOLDER_UNWRITABLE", f"Cannot write to {folder}: {error.strerror}.", "Name another folder."
        ) from error
    print(f"Certificates for {args.days} days are in {folder}:\n")
    print(f"  ca.pem, public-ca.pem   the authorities\n  {', '.join(f'{name}.pem' for name in IDENTITIES)}")
    print("  public.pem              of the router's public ports")
    print(f"  {PAGE_MAC_KEY}            of the MACs of KV pages\n")
    print(f"  quire_worker --tls-cert {folder}/worker.pem --tls-key {folder}/worker.key --tls-ca {folder}/ca.pem")
    print("  quire_router ... " + f"--ssl-certfile {folder}/public.pem --ssl-keyfile {folder}/public.key")
    return 0


def _is_host(host: str) -> bool:
    """Return whether a text is an IP address or a DNS name, which may begin with a wildcard label."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(_DNS_NAME.fullmatch(host))
    return True


def _write_page_mac_key(path: Path) -> None:
    """Write a new key of 32 random bytes, in hex, that only this user can read. An existing key stays, since pages have
    MACs with it. The file appears with the whole key in it."""
    from quire.cli.credentials.authority import replace_file

    if not path.exists():
        replace_file(path, f"{secrets.token_hex(32)}\n".encode(), 0o600)
