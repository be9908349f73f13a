"""The kvstore as a child process, for tests that start, stop and kill it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

import grpc

from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from quire_common.kv.kv_client import KvClient


class KvstoreProcess:
    """`python -m quire_kvstore` on a free port."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "quire_kvstore", "--listen", "127.0.0.1:0", *flags]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = ""
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read_on, daemon=True)

    def wait_ready(self) -> None:
        assert self.child.stderr is not None
        for text in self.child.stderr:
            self.lines.append(text)
            line = json.loads(text)
            if line["message"] == "listening":
                self.address = line["address"]
            if line["message"] == "ready":
                self._reader.start()
                return
        raise AssertionError(f"it did not start: {self.lines}")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        """SIGKILL, as often as one likes."""
        self.child.kill()
        self._ended()

    def messages(self, message: str) -> list[dict[str, Any]]:
        """Log lines of this message."""
        lines = [json.loads(text) for text in self.lines]
        return [line for line in lines if line["message"] == message]

    def _ended(self) -> int:
        code = self.child.wait(timeout=60)
        if self._reader.ident is not None:
            self._reader.join(60)
        assert self.child.stderr is not None
        if not self.child.stderr.closed:
            self.lines += self.child.stderr.readlines()
            self.child.stderr.close()
        return code

    def _read_on(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(self.child.stderr)


class Connection:
    """A channel to it, the client that workers use, and the plain stub."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.client = KvClient(self.channel, timeout_s=60)
        self.stub: Any = kvstore_pb2_grpc.KvStoreStub(self.channel)

    def tier(self, medium: str) -> Any:
        stats = self.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
        return next(tier for tier in stats.tiers if tier.medium == medium)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
