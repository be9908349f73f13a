"""Sends the requests of a batch from several threads, each with its own connection, and stores the answers.

If a server asks to retry later (429, 503, or 529 in Anthropic's API), or if the connection breaks, the request is sent
again, `retries` times at most, after a pause that grows, or after the time that the server names if that is longer. No
pause is longer than 30 s.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import uuid
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Event, Thread, local
from typing import Any

from quire.batch.base_url import parse_base_url
from quire.batch.batch_file import BatchFile, BatchRequest, is_good
from quire.channel import bearer

_TIMEOUT_S = 3600.0
_MOST_WAIT_S = 30.0
_AGAIN = frozenset({429, 503, 529})
_NOT_JSON = "NOT_JSON"


def run_batch(
    files: BatchFile, todo: Sequence[BatchRequest], base_url: str, api_key: str | None, concurrency: int, retries: int
) -> int:
    """Send every request of `todo` from at most `concurrency` threads, and append each answer, good or failed, to the
    file. A request without an answer, or with the status 429, 503 or 529, is sent up to `retries` more times. Returns
    the number of requests that failed finally. On a terminal, standard error shows the count. If the run is
    interrupted, the answers so far are kept, and requests that have not begun are not sent. The interrupted run ends
    when the answers of the requests under way are appended, or at a second interrupt. An answer that cannot be written
    ends the run at once with the error of `BatchFile.append`, and the threads do not keep the process from ending.
    Raises InvalidArgument if the base URL is malformed, or a header cannot hold the API key."""
    sender = _Sender(base_url, api_key, retries)
    failed = 0
    results: SimpleQueue[bool | Exception] = SimpleQueue()
    shared, stopped = iter(todo), Event()

    def one(request: BatchRequest) -> bool:
        """Send one request, and append its answer to the file. Returns whether the answer is good. A failure is written
        too, as OpenAI does; the next run sends this request again."""
        answer = sender.send(request)
        files.append(request.custom_id, answer)
        return is_good(answer)

    def work() -> None:
        """Send one request after the other, until none is left or the run ends."""
        for request in shared:
            if stopped.is_set():
                return
            try:
                results.put(one(request))
            except Exception as error:
                results.put(error)

    # Not a ThreadPoolExecutor: Python would wait for its threads before the process ends.
    threads = [Thread(target=work, name=f"batch {i}", daemon=True) for i in range(min(concurrency, len(todo)))]
    try:
        for thread in threads:
            thread.start()
        for done in range(1, len(todo) + 1):
            result = results.get()
            if isinstance(result, Exception):
                raise result
            failed += not result
            if sys.stderr.isatty():
                print(f"\r{done}/{len(todo)}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        stopped.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    finally:
        stopped.set()
        if sys.stderr.isatty():
            print(file=sys.stderr)
    return failed


class _Sender:
    """Sends requests from several threads, each over its own kept-alive connection."""

    def __init__(self, base_url: str, api_key: str | None, retries: int) -> None:
        self._url = parse_base_url(base_url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = bearer(api_key)
        self._retries = retries
        self._here = local()

    def send(self, request: BatchRequest) -> dict[str, Any]:
        """Send the request, and return its line of the output in OpenAI's form: the body in `response` for status 200,
        else in `error`. A body that is not JSON, as that of a stream, is an error (see `_send_once`). Without an answer
        (status 0), or after 429, 503 or 529, the request is sent again, `retries` times at most. The wait before it is
        0.5 s, then twice the last wait, or what the server names if that is longer; at most 30 s."""
        request_id = f"batch_req_{uuid.uuid4().hex}"
        status, body, wait_s = 0, dict[str, Any](), 0.5
        for attempt in range(self._retries + 1):
            status, body, retry_after_s = self._send_once(request, request_id)
            if (status and status not in _AGAIN) or attempt == self._retries:
                break
            wait_s = min(_MOST_WAIT_S, max(retry_after_s, wait_s * 2 if attempt else wait_s))
            time.sleep(wait_s)
        good = status == 200 and body.get("code") != _NOT_JSON
        return {
            "id": request_id,
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body if good else None},
            "error": None if good else body,
        }

    def _send_once(self, request: BatchRequest, request_id: str) -> tuple[int, dict[str, Any], float]:
        """Send the request once over this thread's connection. Returns the status (0: no answer), the body, and the
        seconds of Retry-After (0: none, or not a number). The connection stays open for the thread's next request. A
        connection error, or an answer that is no JSON object, becomes a body with `code` and `message`."""
        connection: http.client.HTTPConnection | None = getattr(self._here, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._url.secure else http.client.HTTPConnection
            connection = self._here.connection = kind(self._url.host, self._url.port, timeout=_TIMEOUT_S)
        try:
            body = json.dumps(request.body).encode()
            headers = {**self._headers, "X-Request-Id": request_id}
            connection.request("POST", self._url.path + request.url, body, headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return 0, {"code": "UNREACHABLE", "message": str(error) or type(error).__name__}, 0.0
        try:
            found = json.loads(raw)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            found = {"code": _NOT_JSON, "message": raw[:500].decode("utf-8", "replace")}
        try:
            retry_after_s = float(answer.headers.get("Retry-After", 0))
        except ValueError:
            retry_after_s = 0.0
        return answer.status, found, retry_after_s
