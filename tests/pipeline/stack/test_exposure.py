"""What a stack shows to the world: nothing, unless it was told to."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import httpx
import psutil
import pytest

from quire.local.stack import LocalStack
from tests.pipeline.leftovers import processes_of


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    # gRPC binds 127.0.0.1 as ::ffff:127.0.0.1, which is the same.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def test_every_port_listens_on_loopback_alone(stack: LocalStack) -> None:
    state = stack.directory.read()
    assert state is not None
    listening = [
        (process.name(), connection.laddr.ip)
        for process in processes_of(state.stack_id)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 6
    assert {name for name, address in listening if not is_loopback(address)} == set()


def test_state_directory_is_private(stack: LocalStack) -> None:
    assert stack.directory.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("service", ["router", "tokenizer", "scheduler", "kvstore", "worker"])
def test_process_runs_the_module_of_its_service(stack: LocalStack, service: str) -> None:
    state = stack.directory.read()
    assert state is not None
    command = psutil.Process(state.services[service].pid).cmdline()
    assert command[1:3] == ["-m", f"quire_{service}"]


CANARY = "xq7canary7qx"
SAYS_IT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": CANARY, "max_tokens": 2, "stop": [CANARY], "user": CANARY}),
    ("/v1/completions", {"prompt": CANARY * 9000}),
    ("/v1/completions", {"prompt": [CANARY, 5]}),
    ("/v1/completions", {"prompt": "a", "model": CANARY}),
    ("/v1/completions", {"prompt": "a", CANARY: 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": CANARY}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", CANARY: CANARY}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": CANARY}],
            "chat_template_kwargs": {"messages": CANARY, "bos_token": [CANARY]},
            "max_tokens": 2,
        },
    ),
]


def test_logs_contain_no_client_text(stack: LocalStack, http: httpx.Client) -> None:
    for path, body in SAYS_IT:
        answer = http.post(path, json=body, headers={"Authorization": f"Bearer {CANARY}"})
        assert answer.status_code < 500, (path, body)
    http.post("/v1/completions", content=b'{"prompt": "' + CANARY.encode())
    http.get(f"/{CANARY}?{CANARY}", headers={"Authorization": f"Bearer {CANARY}"})
    logs = [log for log in stack.directory.path.rglob("*") if log.is_file()]
    assert {"router.log", "tokenizer.log", "worker.log"} <= {log.name for log in logs}
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        assert not [line for line in lines if CANARY in line], log.name
    router = next(log for log in logs if log.name == "router.log")
    assert any(json.loads(line).get("route") == "/v1/completions" for line in router.read_text().splitlines())
