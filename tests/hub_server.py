"""A Hugging Face hub of one repository, and a cache as its library writes it, for tests: no network is needed."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves the files of `org/name` at COMMIT, which `main` and `v1` mean. `requests` are the paths asked for."""

    def __init__(self, repo: str, files: Mapping[str, bytes], *, gated: bool = False) -> None:
        self.requests: list[str] = []
        self.files = dict(files)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub.answer(repo, self.path, gated=gated)
                hub.requests.append(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, repo: str, path: str, *, gated: bool) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        error = {"X-Error-Message": "no"}
        if not path.startswith((f"/api/models/{repo}/", f"/{repo}/resolve/")):
            return 404, {"X-Error-Code": "RepoNotFound", **error}, b"{}"
        if gated:
            return 403, {"X-Error-Code": "GatedRepo", **error}, b"{}"
        kind, revision, name = re.fullmatch(r".*/(revision|tree|resolve)/([^/]+)/?(.*)", path).groups()  # type: ignore[union-attr]  # of this form by the check above
        if revision not in (COMMIT, "main", "v1"):
            return 404, {"X-Error-Code": "RevisionNotFound", **error}, b"{}"
        if kind == "revision":
            siblings = [{"rfilename": each, "size": len(body)} for each, body in self.files.items()]
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": each, "size": len(body), "oid": _etag(body)}
                for each, body in self.files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound", **error}, b"{}"
        body = self.files[name]
        return 200, {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT}, body


def fake_cache(cache: Path, repo: str, files: Mapping[str, bytes], *, ref: str = "main", commit: str = COMMIT) -> Path:
    """Write a snapshot as the hub's library does (files are links to blobs), and return its folder."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, body in files.items():
        blob = folder / "blobs" / _etag(body)
        blob.write_bytes(body)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../" * (2 + name.count("/"))) / "blobs" / blob.name)
    return snapshot


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
