"""BatchFile: the two files of a batch, requests and answers. The file of answers is the state of the batch: a request
with a good answer in it is not sent again.

Answers are appended one line at a time. A run that is interrupted only loses the requests that were in flight; an
incomplete line is dropped. Lines end only at line feeds, because texts in JSON may contain other line separators.
This module knows nothing of servers.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import FailedPrecondition, InvalidArgument, NotFound

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)


@dataclass(frozen=True)
class BatchRequest:
    """One line of the file of requests."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BatchFile:
    """The files of one batch. The constructor reads both files, and replaces the output file at once: it keeps the good
    answers to these requests, or none with `restart`. An output that is a symbolic link stays one: the file to which it
    leads is replaced. The constructor raises InvalidArgument if both names are one file, the output is a device or
    pipe, or a request is malformed. It raises NotFound if the requests cannot be read or the output's folder is
    missing, and FailedPrecondition if the output file cannot be read or written. `append` is thread-safe."""

    def __init__(self, input_file: str, output_file: str, *, restart: bool = False) -> None:
        self.requests = _read_requests(Path(input_file))
        self._output = Path(os.path.realpath(output_file))
        if self._output.exists() and self._output.samefile(input_file):
            raise InvalidArgument("SAME_FILE", f"{output_file} has the requests.", "Give another file with -o.")
        given = Path(output_file)  # a pipe behind symbolic links, such as /dev/stdout, has no real path
        if given.exists() and not given.is_file() and not given.is_dir():
            raise InvalidArgument(
                "BATCH_FILE", f"{output_file} is a device or pipe, which keeps no answers.", "Give a file with -o."
            )
        if not self._output.parent.is_dir():
            raise NotFound("BATCH_FILE", f"There is no folder {self._output.parent}.", "Make it, or give another -o.")
        self._lock = threading.Lock()
        # Whether the last answer may have been written in part. If so, the next one begins on a new line.
        self._last_line_cut = False
        self._answers: dict[str, str] = {}
        if not restart:
            self._answers = _read_answers(self._output, {request.custom_id for request in self.requests})
        self._rewrite()

    def todo(self) -> list[BatchRequest]:
        """Return the requests that have no answer yet, in the order of the file. Failed answers of an earlier run count
        as none; those of this run count."""
        return [request for request in self.requests if request.custom_id not in self._answers]

    def append(self, custom_id: str, answer: dict[str, Any]) -> None:
        """Keep an answer, good or failed, and append it to the output file as one JSON line. A later answer to the same
        custom_id counts instead of an earlier one. Thread-safe. Raises FailedPrecondition if the file cannot be
        written; the answer is kept even so."""
        line = _line_of(answer)
        with self._lock:
            self._answers[custom_id] = line
            try:
                with self._output.open("a", encoding="utf-8") as file:
                    file.write("\n" * self._last_line_cut + line + "\n")
                self._last_line_cut = False
            except OSError as error:
                self._last_line_cut = True
                raise _unwritable(self._output, error) from error

    def finish(self) -> None:
        """Write the output file anew, with the answers in the order of the requests. Raises FailedPrecondition if it
        cannot be written; the answers in it stay."""
        self._rewrite()

    def _rewrite(self) -> None:
        """Replace the output file by the answers that are kept, in the order of the requests, in one step. Raises
        FailedPrecondition if it cannot be written."""
        lines = [self._answers[r.custom_id] for r in self.requests if r.custom_id in self._answers]
        temporary = self._output.with_name(self._output.name + ".tmp")
        try:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            temporary.replace(self._output)
        except OSError as error:
            raise _unwritable(self._output, error) from error


def _read_requests(path: Path) -> list[BatchRequest]:
    """Read and check the file of requests, and return them in order; blank lines are skipped. Raises NotFound if the
    file cannot be read or is not UTF-8. Raises InvalidArgument for a line that is not a POST to one of ENDPOINTS with a
    text as custom_id, a url, and an object as body, or that repeats a custom_id. A line without a method counts as
    POST."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound("BATCH_FILE", f"Cannot read {path}.", "Give a file of JSON lines with -i.") from error
    requests: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            request = BatchRequest(value["custom_id"], value["url"], value["body"])
        except (ValueError, KeyError, TypeError) as error:
            raise _bad(path, number, "has no custom_id, url and body") from error
        if not isinstance(request.custom_id, str) or not isinstance(request.body, dict):
            raise _bad(path, number, "has a custom_id that is not a text, or a body that is not an object")
        if value.get("method", "POST") != "POST" or request.url not in ENDPOINTS:
            raise _bad(path, number, f"asks for {value.get('method', 'POST')} {request.url}")
        if request.custom_id in requests:
            raise _bad(path, number, f"repeats the custom_id {request.custom_id!r}")
        requests[request.custom_id] = request
    return list(requests.values())


def _read_answers(path: Path, known: set[str]) -> dict[str, str]:
    """Return the lines of good answers (see `is_good`) to the custom_ids `known`, by custom_id; of several, the last
    one. Empty if there is no file. Failed answers and lines that are no answers are left out, so that these requests
    are sent again. A good answer counts even if a failed one follows it. Raises FailedPrecondition if the file cannot
    be read."""
    answers = {}
    if path.exists():
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise FailedPrecondition(
                "BATCH_FILE", f"Cannot read {path}: {error.strerror}.", "Give another file with -o."
            ) from error
        for line in lines:
            try:
                value = json.loads(line)
                good = value["custom_id"] in known and is_good(value)
            except (ValueError, KeyError, TypeError):
                continue
            if good:
                answers[value["custom_id"]] = line
    return answers


def is_good(answer: dict[str, Any]) -> bool:
    """Return whether an answer has the status 200 and no error. Raises KeyError or TypeError if it is no answer."""
    return bool(answer["response"]["status_code"] == 200 and answer.get("error") is None)


def _line_of(answer: dict[str, Any]) -> str:
    """Return the answer in JSON. An answer with half of a surrogate pair, which UTF-8 cannot encode, is in ASCII."""
    line = json.dumps(answer, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(answer)
    return line


def _unwritable(path: Path, error: OSError) -> FailedPrecondition:
    """Return the error for a file of answers that cannot be written."""
    return FailedPrecondition(
        "BATCH_FILE",
        f"Cannot write {path}: {error.strerror}.",
        "Make room for it, or make it writable, and run the command again: it goes on from there.",
    )


def _bad(path: Path, number: int, cause: str) -> InvalidArgument:
    """Return the error for line `number` of the file of requests; `cause` continues the sentence "Line N of FILE
    ..."."""
    return InvalidArgument(
        "BAD_BATCH_LINE", f"Line {number} of {path} {cause}.", f"Endpoints: {', '.join(ENDPOINTS)}; method POST."
    )
