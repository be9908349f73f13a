"""Two stacks of the same services with a paced worker, which serve the same requests in turn. The comparison shows the
cost of what one stack has and the other has not. The load is closed."""

from __future__ import annotations

import argparse
import json
import os

import grpc

from bench.harness.workload import Request, uniform
from bench.pipeline import services_arm
from bench.scheduler.core_step import ratio
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model

_VOCABULARY = (300, 4096)
_MEASURED = ("output_tokens_per_s", "ttft_p50_ms", "gap_p50_ms", "gap_p99_ms")
_CPU = "cpu_us_per_token"


class PairedStack:
    """A running stack, and the figures of its turns. `flags` are the flags of each service, in addition to the pace."""

    def __init__(
        self,
        program: str,
        arm: str,
        step_ms: float,
        streams: int,
        *,
        tls_folder: str = "",
        secure: grpc.ChannelCredentials | None = None,
        flags: dict[str, dict[str, str | bool]] | None = None,
    ) -> None:
        """`secure` are the client's credentials for a stack with TLS."""
        flags = {service: dict(given) for service, given in (flags or {}).items()}
        flags.setdefault("worker", {}).update({"paced": str(step_ms), "max-num-seqs": str(streams)})
        self.arm = arm
        self.stack = LocalStack(
            StackSpec(f"{program}-{arm}", str(find_model(None)), tls_folder=tls_folder, flags=flags)
        )
        self._secure = secure
        self._streams = streams
        self.figures = {name: list[float]() for name in (*_MEASURED, _CPU)}

    def serve_turn(self, requests: list[Request]) -> None:
        """Serve the requests and print the figures."""
        found = services_arm.run(self.stack, requests, self._streams, self._secure)
        cpu = found["cpu_ms_per_1k_tokens"]
        assert isinstance(cpu, dict)
        for name in _MEASURED:
            self.figures[name].append(float(str(found[name])))
        self.figures[_CPU].append(sum(cpu.values()))
        print(json.dumps({"arm": self.arm, "load": round(os.getloadavg()[0], 1)} | found), flush=True)


def parse_turns(description: str | None) -> argparse.Namespace:
    """Parse the command line: the number of turns, and the load of each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=1.0)
    return parser.parse_args()


def serve_by_turns(plain: PairedStack, other: PairedStack, arguments: argparse.Namespace) -> None:
    """Serve all turns. Each round has the same requests for both stacks, and the stacks take turns at being first."""
    for turn in range(-1, arguments.rounds):
        requests = uniform(arguments.requests, (64, 256), (64, 192), _VOCABULARY, seed=turn + 1)
        for arm in (plain, other) if turn % 2 else (other, plain):
            arm.serve_turn(requests)


def print_ratios(plain: PairedStack, other: PairedStack, feature: str) -> None:
    """Print the other stack's figures divided by the plain stack's figures."""
    # The first pair pays for what is lazy.
    for name, with_feature in other.figures.items():
        print(f"{name} with {feature} / without:", ratio(with_feature[1:], plain.figures[name][1:]))
