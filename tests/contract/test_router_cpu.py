"""The benchmark's router keeps answering, however much it has to say."""

from __future__ import annotations

import httpx

from bench.router_cpu import start_router


def test_a_log_that_nobody_reads_does_not_stop_the_router() -> None:
    process, url, _ = start_router("127.0.0.1:1", "127.0.0.1:1")
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            # Each is a line in the log; a pipe holds 64 KiB.
            for number in range(600):
                answer = http.get("/v1/models", headers={"x-request-id": f"{number:0128}"})
                assert answer.status_code in (200, 503)
    finally:
        process.kill()
        process.wait()
