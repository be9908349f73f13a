"""An SSL context of a server that follows its PEM files: each handshake uses the newest ones."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Self

from quire_common.identity.tls_files import TlsFiles, server_context
from quire_common.identity.watched_files import WatchedFiles

if TYPE_CHECKING:
    from socket import socket


class WatchedContext(ssl.SSLContext):
    """Makes sockets and BIOs by the context of the files as they are now."""

    _files: WatchedFiles[ssl.SSLContext]

    def __new__(cls, what: str, files: TlsFiles, clients: ssl.VerifyMode = ssl.CERT_REQUIRED) -> Self:
        """Load the files. `what` names them in logs and metrics. `clients`, and the ConfigError for files that cannot
        be used: see `server_context`."""
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._files = WatchedFiles(what, files.paths, lambda: server_context(files, clients))
        return context

    def wrap_socket(self, sock: socket, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self._files.value.wrap_socket(sock, *args, **options)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._files.value.wrap_bio(*args, **options)
