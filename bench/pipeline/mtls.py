"""`python -m bench.pipeline.mtls`: what mutual TLS between the services, and TLS to the client, cost.

Two stacks of the same services and a paced worker run at once, one in plain and one with the certificates of
`quire certs`. They serve the same requests by turns, the first of each pair by turns too. The load is closed: as many
streams as there are wait for the next token, and the processors decide how fast that is. Prints a JSON line for each
turn; then throughput, gaps between tokens and CPU time of the services with TLS, divided by those without, with bounds
of 95 % by bootstrap over the pairs of turns. Steps of a few ms keep both cores busy; with longer ones the worker's pace
decides.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import grpc

from bench.harness.workload import Request, uniform
from bench.pipeline import services_arm
from bench.scheduler.core_step import ratio
from quire.__main__ import main as quire
from quire.local.service_tls import PAGE_MAC_KEY, PUBLIC_CA
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model

_VOCABULARY = (300, 4096)
_MEASURED = ("output_tokens_per_s", "ttft_p50_ms", "gap_p50_ms", "gap_p99_ms")
_CPU = "cpu_us_per_token"


class Arm:
    """A running stack, and what its turns gave."""

    def __init__(self, name: str, tls_folder: str, step_ms: float, streams: int) -> None:
        flags: dict[str, dict[str, str | bool]] = {"worker": {"paced": str(step_ms), "max-num-seqs": str(streams)}}
        self.name = name
        self.stack = LocalStack(StackSpec(f"mtls-{name}", str(find_model(None)), tls_folder=tls_folder, flags=flags))
        ca = Path(tls_folder) / PUBLIC_CA
        self._secure = grpc.ssl_channel_credentials(ca.read_bytes()) if tls_folder else None
        self._streams = streams
        self.figures = {name: list[float]() for name in (*_MEASURED, _CPU)}

    def turn(self, requests: list[Request]) -> None:
        """Serve the requests and print the figures."""
        found = services_arm.run(self.stack, requests, self._streams, self._secure)
        cpu = found["cpu_ms_per_1k_tokens"]
        assert isinstance(cpu, dict)
        for name in _MEASURED:
            self.figures[name].append(float(str(found[name])))
        self.figures[_CPU].append(sum(cpu.values()))
        print(json.dumps({"arm": self.name, "load": round(os.getloadavg()[0], 1)} | found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if quire(["certs", folder]):
            raise SystemExit("`quire certs` has failed")
        (Path(folder) / PAGE_MAC_KEY).unlink()  # what the MACs of pages cost is measured by bench.kvstore.page_mac
        plain, secured = (
            Arm(name, tls, arguments.step_ms, arguments.streams) for name, tls in (("plain", ""), ("mtls", folder))
        )
        try:
            for turn in range(-1, arguments.rounds):
                requests = uniform(arguments.requests, (64, 256), (64, 192), _VOCABULARY, seed=turn + 1)
                for arm in (plain, secured) if turn % 2 else (secured, plain):
                    arm.turn(requests)
        finally:
            plain.stack.close()
            secured.stack.close()
    # The first pair pays for what is lazy.
    for name, with_tls in secured.figures.items():
        print(f"{name} with TLS / without:", ratio(with_tls[1:], plain.figures[name][1:]))


if __name__ == "__main__":
    main()
