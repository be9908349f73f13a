"""A benchmark's router keeps answering, however much it has to say."""

from __future__ import annotations

import httpx

from bench.harness.processes import Service


def test_a_log_of_any_length_does_not_stop_the_router() -> None:
    peers = "--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1"
    with Service("router", "--port=0", *peers) as router:
        url = str(router.until(lambda line: "url" in line)["url"])
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            # Each is a line in the log; a pipe holds 64 KiB.
            for number in range(600):
                answer = http.get("/v1/models", headers={"x-request-id": f"{number:0128}"})
                assert answer.status_code in (200, 503)
        assert router.cpu_s() > 0.0
