"""The life of a service process: port opens at once, health, reflection, typed start errors, drain on SIGTERM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quire.v1 import kvstore_pb2, kvstore_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from quire_common.channel import sync_channel
from quire_common.config import ServiceConfig
from quire_common.errors import InvalidArgument, from_rpc_error
from quire_common.telemetry.interceptors import aio_server_interceptors, sync_server_interceptors
from tests.certificates import Authority
from tests.tiers import deep_after

SERVICE = textwrap.dedent(
    """
    import {asyncio_or_time} as clock, os, sys
    from quire.v1 import kvstore_pb2_grpc
    from quire_common.config import ServiceConfig
    from quire_common.errors import ConfigError
    from quire_common.serving.server import {run}, service_main
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class DemoConfig(ServiceConfig):
        "A service for tests."

    class Demo:
        name = "demo"
        def __init__(self, bound):
            bound.when_leaving(lambda: print("leaving", flush=True))
        def register(self, server):
            kvstore_pb2_grpc.add_KvStoreServicer_to_server(kvstore_pb2_grpc.KvStoreServicer(), server)
            return ["quire.v1.KvStore"]
        {a}def start(self):
            while not os.path.exists(os.environ.get("GO", "/")): {w}clock.sleep(0.02)
            if os.environ.get("FAIL"): raise ConfigError("NO_MODEL", "There is no model.", "Name one.")
        {a}def drain(self, timeout_s): print("drained", flush=True)
        {a}def close(self): print("closed", flush=True)

    sys.exit(service_main("demo", DemoConfig, lambda config: {run}(config, Demo)))
    """
)
LIMIT_S = 60.0
KINDS = {
    "aio": SERVICE.format(asyncio_or_time="asyncio", run="run_aio", a="async ", w="await "),
    "sync": SERVICE.format(asyncio_or_time="time", run="run_sync", a="", w=""),
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    tmp_path: Path, kind: str, *flags: str, edit: Callable[[str], str] = str, **env: str
) -> subprocess.Popen[str]:
    script = tmp_path / "demo.py"
    script.write_text(edit(KINDS[kind]))
    return subprocess.Popen(
        [sys.executable, str(script), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_under_mutual_tls_checks_callers_and_its_probe_verifies_its_name(tmp_path: Path, kind: str) -> None:
    """The demo is a kvstore by the name of its config. A caller with the right to a method reaches the
    demo's own handler, which is not implemented (INTERNAL)."""
    authority, address = Authority(tmp_path), f"127.0.0.1:{free_port()}"
    own = authority.files("own", "kvstore")
    tls = ("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca)
    process = start(
        tmp_path, kind, "--listen", address, *tls, edit=lambda text: text.replace("DemoConfig", "KvstoreConfig")
    )
    try:
        told = {}
        for caller in ("worker", "router"):
            files = authority.files(caller, caller)
            config = ServiceConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
            with contextlib.closing(sync_channel(address, config, "kvstore")) as channel:
                call: Any = channel.unary_unary("/quire.v1.KvStore/BeginPut")
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"", timeout=LIMIT_S, wait_for_ready=True)
                told[caller] = from_rpc_error(caught.value).code
        assert told == {"worker": "INTERNAL", "router": "CALLER_NOT_ALLOWED"}
        own_name = {"SERVICE": "scheduler", "SERVER_NAME": "kvstore.quire.internal"}
        for named, code in (({"SERVICE": "kvstore"}, 0), ({}, 0), ({"SERVICE": "scheduler"}, 1), (own_name, 0)):
            probe = {"TLS_CERT": own.cert, "TLS_KEY": own.key, "TLS_CA": own.ca, **named}
            environment = {f"QUIRE_HEALTHCHECK_{name}": value for name, value in probe.items()}
            command = [sys.executable, "-m", "quire_common.healthcheck", address]
            assert subprocess.run(command, env={**os.environ, **environment}, check=False).returncode == code, named
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


def health(address: str, name: str = "quire.v1.KvStore") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=name)
        return int(stub.Check(request, timeout=LIMIT_S, wait_for_ready=True).status)


@pytest.mark.parametrize("kind", KINDS)
def test_port_opens_before_ready_and_sigterm_drains(tmp_path: Path, kind: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    go = tmp_path / "go"
    process = start(tmp_path, kind, "--listen", address, GO=str(go))
    try:
        assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        go.touch()
        deadline = time.monotonic() + LIMIT_S
        while health(address) != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with grpc.insecure_channel(address) as channel:
            names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert {"quire.v1.KvStore", "grpc.health.v1.Health"} <= names
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out.split() == ["leaving", "drained", "closed"]


def stop_once_serving(
    process: subprocess.Popen[str],
    address: str,
    code: int = 0,
    told: tuple[str, ...] = ("leaving", "drained", "closed"),
) -> str:
    """Stop a process with SIGTERM as soon as it serves. Checks its exit code and what it told on its way out, by
    default that it left, drained and closed. Returns its standard error."""
    try:
        while health(address) != health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.split()) == (code, [*told]), err
    return err


def test_registry_that_does_not_answer_a_withdrawal_does_not_end_the_drain(tmp_path: Path) -> None:
    late = """
from quire_common.serving import server
def late(self): raise TimeoutError
server.ThreadAnnouncement.close = late
sys.exit("""
    address = f"127.0.0.1:{free_port()}"
    process = start(tmp_path, "sync", "--listen", address, edit=lambda text: text.replace("sys.exit(", late))
    err = stop_once_serving(process, address)
    assert "start failed" not in err and "registration was not withdrawn" in err


@pytest.mark.parametrize("kind", KINDS)
def test_function_that_fails_when_the_service_leaves_does_not_end_the_drain(tmp_path: Path, kind: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    told = "bound.when_leaving("
    process = start(
        tmp_path, kind, "--listen", address, edit=lambda text: text.replace(told, f"{told}lambda: 1 / 0); {told}")
    )
    err = stop_once_serving(process, address)
    assert "start failed" not in err and "ZeroDivisionError" in err


@pytest.mark.parametrize("kind", KINDS)
def test_drain_that_fails_is_not_logged_as_a_failed_start(tmp_path: Path, kind: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    drained = 'print("drained", flush=True)'
    process = start(tmp_path, kind, "--listen", address, edit=lambda text: text.replace(drained, "1 / 0"))
    err = stop_once_serving(process, address, code=2, told=("leaving", "closed"))
    assert "stop failed" in err and "start failed" not in err and "ZeroDivisionError" in err


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_tells_liveness_from_readiness(tmp_path: Path, kind: str) -> None:
    address, go = f"127.0.0.1:{free_port()}", tmp_path / "go"
    process = start(tmp_path, kind, "--listen", address, GO=str(go))
    probe = [sys.executable, "-m", "quire_common.healthcheck", address]

    def codes() -> list[int]:
        names: tuple[tuple[str, ...], ...] = (("liveness",), ("readiness",), (), ("nonsense",))
        return [subprocess.run([*probe, *name], check=False, capture_output=True).returncode for name in names]

    try:
        assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert codes() == [0, 1, 1, 2]
        go.touch()
        while health(address) != health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.05)
        assert codes() == [0, 0, 0, 2]
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


@pytest.mark.deep
def test_a_loop_that_is_stuck_does_not_live(tmp_path: Path) -> None:
    """The metrics port has threads of its own, which would answer all the same."""
    address, metrics, go = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", tmp_path / "go"

    def blocking(script: str) -> str:
        return script.replace("await clock.sleep(0.02)", "__import__('time').sleep(0.02)")

    process = start(tmp_path, "aio", "--listen", address, "--metrics-listen", metrics, edit=blocking, GO=str(go))

    def livez() -> int:
        try:
            with urllib.request.urlopen(f"http://{metrics}/livez", timeout=LIMIT_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:  # not open yet
            return 0

    try:
        while (status := livez()) == 0:
            time.sleep(0.05)
        assert status == 503
        go.touch()
        while livez() != 200:
            time.sleep(0.05)
    finally:
        go.touch()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_a_leaving_service_serves_on_for_its_delay_and_says_so(tmp_path: Path, kind: str) -> None:
    """Callers that have not heard of it are served for the delay; a second signal ends the delay."""
    delay_s, address = 2.0, f"127.0.0.1:{free_port()}"
    for signals in (1, 2):
        process = start(tmp_path, kind, "--listen", address, "--drain-delay-s", str(delay_s))
        while health(address) != health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        began, served_s, phases = time.monotonic(), 0.0, set()
        assert process.stdout is not None and process.stdout.readline() == "leaving\n"
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        else:
            while time.monotonic() - began < delay_s - 0.5:
                phases.add(health(address))  # raises where nobody serves
                assert health(address, "liveness") == health_pb2.HealthCheckResponse.SERVING
                served_s = time.monotonic() - began
                time.sleep(0.05)
        out, err = process.communicate(timeout=LIMIT_S)
        ended_s = time.monotonic() - began
        assert (process.returncode, out.split()) == (0, ["drained", "closed"]), err
        if signals == 1:
            assert phases == {health_pb2.HealthCheckResponse.NOT_SERVING}
            assert served_s > 1.0 and ended_s >= delay_s
        else:
            assert ended_s < delay_s


@pytest.mark.deep
def test_sigterm_during_a_native_start_exits_cleanly(tmp_path: Path) -> None:
    """A load goes on in its thread; at the interpreter's end C++ would abort the process (SIGABRT)."""
    native = "import torch; print('loading', flush=True)\n        while True: torch.rand(64, 64) @ torch.rand(64, 64)"
    script = tmp_path / "native.py"
    script.write_text(
        KINDS["sync"].replace('while not os.path.exists(os.environ.get("GO", "/")): clock.sleep(0.02)', native)
    )
    for _ in range(3):
        command = [sys.executable, str(script), "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out.split()) == (0, ["drained", "closed"]), err
        assert json.loads(err.strip().splitlines()[-1])["message"] == "stopped"


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_start_names_cause_and_fix(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path, kind, FAIL="1")
    _, err = process.communicate(timeout=LIMIT_S)
    last = json.loads(err.strip().splitlines()[-1])
    assert process.returncode == 2
    assert (last["code"], last["error"], last["fix"]) == ("NO_MODEL", "There is no model.", "Name one.")


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("flags", "code"),
    deep_after(
        2,
        [
            (("--listen", "nonsense"), "BAD_ADDRESS"),
            (("--frobnicate", "1"), "UNKNOWN_FLAG"),
            (("--log-level", "loud"), "BAD_VALUE"),
            (("--drain-timeout-s", "nan"), "BAD_VALUE"),
            (("--config", "absent.yaml"), "CONFIG_UNREADABLE"),
        ],
    ),
)
def test_bad_flags_are_fatal_and_named(tmp_path: Path, kind: str, flags: tuple[str, ...], code: str) -> None:
    process = start(tmp_path, kind, *flags)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert json.loads(err.strip().splitlines()[-1])["code"] == code


@pytest.mark.parametrize("kind", KINDS)
def test_taken_port_is_named(tmp_path: Path, kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(tmp_path, kind, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert json.loads(err.strip().splitlines()[-1])["code"] == "PORT_IN_USE"


async def test_broken_utf8_is_a_typed_error_over_aio() -> None:
    """A string that is not UTF-8 fails in the deserialiser, before any handler: still a code, a cause and a fix."""
    server = grpc.aio.server(interceptors=aio_server_interceptors())
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(tokenizer_pb2_grpc.TokenizerServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            encode: Any = channel.unary_unary("/quire.v1.Tokenizer/Encode")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await encode(b"\x12\x02\xff\xfe")  # field 2, a string
        error = from_rpc_error(caught.value)
        assert (type(error), error.code) == (InvalidArgument, "UNREADABLE_MESSAGE")
        assert error.fix
    finally:
        await server.stop(None)


def test_broken_utf8_is_a_typed_error_over_threads() -> None:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=sync_server_interceptors())
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(tokenizer_pb2_grpc.TokenizerServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            encode: Any = channel.unary_unary("/quire.v1.Tokenizer/Encode")
            with pytest.raises(grpc.RpcError) as caught:
                encode(b"\x12\x02\xff\xfe")
        error = from_rpc_error(caught.value)
        assert (type(error), error.code) == (InvalidArgument, "UNREADABLE_MESSAGE")
    finally:
        server.stop(None).wait()


class StreamServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Reads streams to their end."""

    async def Detokenize(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield tokenizer_pb2.DetokenizeResponse()


class PutServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Reads streams to their end, in a thread."""

    def Put(self, request_iterator: Iterator[Any], context: Any) -> Any:
        return kvstore_pb2.PutResponse(pages=sum(1 for _ in request_iterator))


async def test_a_broken_message_in_a_stream_is_a_typed_error_over_aio() -> None:
    """The messages before it are answered."""
    server = grpc.aio.server(interceptors=aio_server_interceptors())
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(StreamServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream("/quire.v1.Tokenizer/Detokenize")
            answers = call(iter([b"", b"\x12\x7f"]))
            assert await answers.read() == b""
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers.read()
        error = from_rpc_error(caught.value)
        assert (type(error), error.code) == (InvalidArgument, "UNREADABLE_MESSAGE")
    finally:
        await server.stop(None)


def test_a_broken_message_in_a_stream_is_a_typed_error_over_threads() -> None:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=sync_server_interceptors())
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(PutServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            put: Any = channel.stream_unary("/quire.v1.KvStore/Put")
            with pytest.raises(grpc.RpcError) as caught:
                put(iter([b"", b"\x12\x7f"]))
        error = from_rpc_error(caught.value)
        assert (type(error), error.code) == (InvalidArgument, "UNREADABLE_MESSAGE")
    finally:
        server.stop(None).wait()
