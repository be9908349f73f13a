"""Ports that are to be listened on, and a Redis that is to be used."""

from __future__ import annotations

import socket
import time

from quire.doctor.finding import Finding, failed, ok, warning

_TIMEOUT_S = 3.0
_SLOW_S = 0.05
_LEAST_VERSION = 6


def check_port(host: str, port: int) -> Finding:
    """Free, or who has it if it is a Quire."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return warning(
                "port",
                f"{host}:{port} is taken ({error.strerror})",
                "`quire up` then takes a free one; or give --port.",
            )
    return ok("port", f"{host}:{port} is free")


def check_redis(address: str) -> Finding:
    """It answers, soon, and is not too old."""
    host, _, port = address.removeprefix("redis://").partition("/")[0].rpartition(":")
    began = time.perf_counter()
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), _TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\nINFO server\r\n")
            connection.settimeout(_TIMEOUT_S)
            answer = b""
            while b"redis_version:" not in answer and not answer.startswith(b"-") and len(answer) < 65536:
                piece = connection.recv(4096)
                if not piece:
                    break
                answer += piece
    except (OSError, ValueError) as error:
        return failed("redis", f"{address} does not answer: {error}", "Start it, or correct --redis host:port.")
    took_s = time.perf_counter() - began
    if answer.startswith(b"-"):
        return warning("redis", f"{address} wants a password", "Put it in the URL: redis://:password@host:port/0.")
    version = answer.partition(b"redis_version:")[2].split(b"\r", 1)[0].decode("ascii", "replace")
    if not version[:1].isdigit() or int(version.split(".")[0]) < _LEAST_VERSION:
        return failed("redis", f"{address} is version {version or 'unknown'}", f"Use {_LEAST_VERSION} or later.")
    if took_s > _SLOW_S:
        return warning("redis", f"{version}, {took_s * 1000:.0f} ms away", "Rate limits wait for it: put it nearer.")
    return ok("redis", f"{version}, {took_s * 1000:.1f} ms away")
