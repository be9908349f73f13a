"""`quire demo-pd`: starts prefill and decode replicas, each member in its own network namespace. It answers long
prompts, shows in tables how their pages moved, and stops everything. If the stack fails, its logs are left."""

from __future__ import annotations

import argparse
import os
import signal
import time
import types
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quire.cli.output import terminal

if TYPE_CHECKING:
    from quire.cli.output.page_flow import PageFlow
    from quire.cli.output.page_watch import PageWatch
    from quire.client import Client
    from quire.local.private_network import PrivateNetwork
    from quire.local.spec import StackSpec
    from quire.local.stack import LocalStack
    from quire.local.state import StackState

HELP = "the same with prefill and decode apart: show how pages go from replica to replica, stop"
_LINES = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n",
    "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\nDeny thy father and refuse thy name;\n",
    "HAMLET:\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n",
    "MACBETH:\nIs this a dagger which I see before me,\nThe handle toward my hand? Come, let me clutch thee.\n",
    "KING HENRY:\nOnce more unto the breach, dear friends, once more;\nOr close the wall up with our English dead.\n",
    "ANTONY:\nFriends, Romans, countrymen, lend me your ears;\nI come to bury Caesar, not to praise him.\n",
)
# Of a prompt: some seven hundred tokens.
_SPEECHES = 20
_DRAIN_S = 5.0
_METRICS_PORT = 9464


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the model, the replicas, the requests, and whether to use network namespaces."""
    parser.add_argument("--model", help="folder of the model (default: the demo model of the source)")
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="prefill replicas (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=2, metavar="N", help="decode replicas (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=6, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--netns",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="each member in a network namespace of its own (default), or all on ports of 127.0.0.1",
    )


def run(args: argparse.Namespace) -> int:
    """Start prefill and decode replicas, each member in a network namespace unless --no-netns is given. Print the
    answers to long prompts and tables of how their pages moved, then stop all. SIGTERM stops the demo as Ctrl-C does,
    by a handler that stays. Returns the exit code: 1 if a process or the network's interface is left. Raises
    FailedPrecondition if this user may not make network namespaces."""
    from quire.cli.output.page_flow import flow_matrix, flow_table
    from quire.cli.output.page_watch import PageWatch
    from quire.cli.output.progress import ProgressLines
    from quire.client import Client
    from quire.local.private_network import PrivateNetwork
    from quire.local.stack import LocalStack

    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as alive:
        spec = _spec(args)
        network = alive.enter_context(PrivateNetwork(spec.members)) if args.netns else None
        spec = _with_metrics(spec, network)
        print(f"{len(spec.members)} processes, serving {spec.model}\n", flush=True)
        stack = LocalStack(spec, ProgressLines(spec.members))
        state = stack.directory.read()
        try:
            _say_where(stack, network)
            watch = PageWatch(stack)
            with Client(stack.grpc) as client:
                flows = [_ask(client, watch, number, args.max_tokens) for number in range(args.requests)]
            print(f"\n{flow_table(flows)}\n\n{flow_matrix(flows)}")
        finally:
            began = time.perf_counter()
            stack.close()
    left, seconds = _left(state, network), time.perf_counter() - began
    print(f"\nAll stopped in {seconds:.1f} s; {left or 'no process, namespace or interface is left'}.")
    return 1 if left else 0


def _spec(args: argparse.Namespace) -> StackSpec:
    """Return the spec of the demo's stack. Its router sends prompts of 64 tokens or more to the prefill side, even if
    that is slower."""
    from quire.local.spec import StackSpec
    from quire.models import find_model

    return StackSpec(
        name=f"demo-pd-{os.getpid()}",
        model=str(find_model(args.model)),
        replicas=0,
        prefill=args.prefill,
        decode=args.decode,
        keep_directory=False,
        drain_timeout_s=_DRAIN_S,
        # A demonstration: prompts go to the prefill side, whether or not that is quicker on an idle machine.
        flags={"router": {"pd-threshold-tokens": "64", "pd-least-tokens": "64", "pd-by-rates": False}},
    )


def _with_metrics(spec: StackSpec, network: PrivateNetwork | None) -> StackSpec:
    """Return the spec with a metrics address for each worker, which reports there the pages that it moved. With a
    network, each member runs in its own namespace; without one, the addresses are free ports of 127.0.0.1."""
    from dataclasses import replace

    from quire.local.ports import free_ports
    from quire.local.spec import LOOPBACK

    workers = spec.members_of("worker")
    if network is None:
        ports = dict(zip(workers, free_ports(len(workers)), strict=True))
        at = {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
    else:
        spec = spec.in_network(network)
        at = {name: f"{network.hosts[name]}:{_METRICS_PORT}" for name in workers}
    return replace(spec, flags={**spec.flags, **{name: {"metrics-listen": address} for name, address in at.items()}})


def _say_where(stack: LocalStack, network: PrivateNetwork | None) -> None:
    """Print how long the start took and, if there is a network, a table with the address of each member."""
    print(f"\nUp after {stack.ready.seconds:.1f} s", end="")
    if network is None:
        print(", on ports of 127.0.0.1.\n", flush=True)
        return
    rows = [[name, host] for name, host in reversed(network.hosts.items())]
    print(", each in a network namespace of its own:\n")
    print(terminal.table(["member", "address"], rows), end="\n\n", flush=True)


def _ask(client: Client, watch: PageWatch, number: int, max_tokens: int) -> PageFlow:
    """Send long prompt number `number` to the stack, print its last line and the streamed answer, and return the flow
    of its pages. The times to the first token, and from it to the second, are measured here; the latter is 0 if there
    is one token, or both came together."""
    from quire.outputs import HopTiming
    from quire.sampling_params import SamplingParams

    speeches = [_LINES[(number + place) % len(_LINES)] for place in range(_SPEECHES)]
    prompt = f"ACT {number + 1}.\n" + "".join(speeches)
    last = prompt.rstrip().rpartition("\n")[2]
    print(terminal.paint(f"{number + 1}. [...] {last}\n", "dim"), end="", flush=True)
    began, times, timings, tokens = time.perf_counter(), list[float](), list[HopTiming](), 0
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=max_tokens)
    for delta in client.generate(prompt, params, return_token_ids=True, return_timings=True):
        times += [time.perf_counter()] * len(delta.token_ids)
        timings += delta.timings
        tokens = delta.usage.prompt_tokens if delta.usage is not None else tokens
        print(terminal.paint(delta.text, "bold"), end="", flush=True)
    print(flush=True)
    first_s, second_s = (*times, *times[-1:])[:2]
    return watch.flow(tokens, timings, (first_s - began) * 1e3, (second_s - first_s) * 1e3)


def _left(state: StackState | None, network: PrivateNetwork | None) -> str:
    """Return a text that names the processes of the stack that still run, and the network's interface if it is still
    there; empty if all is gone."""
    from quire.local.pids import marked

    found = [f"process {process.pid}" for process in marked(state.stack_id)] if state is not None else []
    if network is not None and network.is_there():
        found.append("the network's interface")
    return ", ".join(found) + " is left" if found else ""


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt
