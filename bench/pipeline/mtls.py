"""`python -m bench.pipeline.mtls`: measures the cost of mutual TLS between the services, and of TLS to the client.

Two stacks of the same services with a paced worker run at once, one without TLS and one with the certificates of `quire
certs`. They serve the same requests in turn, and also take turns at being first. The load is closed: each stream always
waits for its next token, so the processors decide the speed. The program prints a JSON line for each turn. Then it
prints throughput, gaps between tokens and CPU time of the services with TLS, divided by those without, with bounds of
95 % by bootstrap over the pairs of turns. Steps of a few ms keep both cores busy; with longer steps the worker's pace
decides.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc

from bench.pipeline.paired_stacks import PairedStack, parse_turns, print_ratios, serve_by_turns
from quire.__main__ import main as quire
from quire.local.service_tls import PAGE_MAC_KEY, PUBLIC_CA


def main() -> None:
    arguments = parse_turns(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if quire(["certs", folder]):
            raise SystemExit("`quire certs` has failed")
        (Path(folder) / PAGE_MAC_KEY).unlink()  # what the MACs of pages cost is measured by bench.kvstore.page_mac
        secure = grpc.ssl_channel_credentials((Path(folder) / PUBLIC_CA).read_bytes())
        load = arguments.step_ms, arguments.streams
        plain = PairedStack("mtls", "plain", *load)
        secured = PairedStack("mtls", "mtls", *load, tls_folder=folder, secure=secure)
        try:
            serve_by_turns(plain, secured, arguments)
        finally:
            plain.stack.close()
            secured.stack.close()
    print_ratios(plain, secured, "TLS")


if __name__ == "__main__":
    main()
