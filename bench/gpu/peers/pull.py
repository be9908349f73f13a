"""Stage 7: copies KV pages from one GPU to another GPU of the host, by CUDA IPC between two processes.

Each process sees only its own GPU, as workers of a deployment do. If that is not possible, both see both GPUs. With one
GPU, two processes share it. This shows that the bytes are right, and says nothing about a link.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import torch

from bench import ROOT
from bench.gpu.record import Recorder
from quire.local.gpus import VISIBLE
from quire.local.gpus import visible_gpus as named_gpus

PAGE_BYTES, PAGES, SMALL_PAGE_BYTES = 2 << 20, 1537, 64 << 10
_WANTED = 0.8
_LIMIT_S = 90.0


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Run the stage. Without a GPU, run only the kernel, under the interpreter."""
    if not torch.cuda.is_available():
        _interpreted(recorder)
        recorder.skip("pages from GPU to GPU", "there is no GPU")
        return
    gpus = visible_gpus()
    if len(gpus) < 2:
        recorder.skip("bandwidth between GPUs", "there is one GPU")
    pairs = [((gpus[0],), (gpus[-1],))] + ([((gpus[0], gpus[-1]), (gpus[-1], gpus[0]))] if len(gpus) > 1 else [])
    for theirs, ours in pairs:
        found = _pull(recorder, theirs, ours, PAGE_BYTES, 65 if tiny else PAGES)
        if found:
            _judge(recorder, found, link=len(gpus) > 1 and not tiny)
            _pull(recorder, theirs, ours, SMALL_PAGE_BYTES, 65 if tiny else PAGES)
            return


def _interpreted(recorder: Recorder) -> None:
    from quire_worker.ops.triton.gather_pages import GatherShape, gather_pages

    theirs, ours = torch.randint(0, 256, (5, 1024), dtype=torch.uint8), torch.zeros((5, 1024), dtype=torch.uint8)
    pages = np.array([4, 1, 2], np.int32)
    gather_pages(theirs.data_ptr(), ours, pages, pages[::-1].copy(), GatherShape(2, 128, 4))
    recorder.check("pages gathered by the kernel", torch.equal(ours[[2, 1, 4]], theirs[[4, 1, 2]]))


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, in the form for its children; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    if VISIBLE in os.environ:
        return list(named_gpus())
    return [str(index) for index in range(torch.cuda.device_count())]


def _pull(
    recorder: Recorder, theirs: tuple[str, ...], ours: tuple[str, ...], page_bytes: int, pages: int
) -> list[dict[str, float]]:
    """Return the results by method and number of pages; empty if the memory could not be opened."""
    found: list[dict[str, float]] = []
    title = f"{page_bytes >> 10} KiB, {'own GPU alone seen' if len(ours) == 1 else 'both GPUs seen'}"
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "bench.gpu.peers.pool", str(pages), str(page_bytes)]
        exporter = stack.enter_context(_process(command, theirs))
        descriptor = (exporter.stdout.readline() if exporter.stdout else "").strip()
        if not descriptor:
            recorder.check(f"memory exported, {title}", False)
            return []
        command = [sys.executable, "-m", "bench.gpu.peers.puller", descriptor, str(page_bytes)]
        puller = stack.enter_context(_process(command, ours))
        for line in puller.stdout or ():
            figures = json.loads(line)
            name = figures.pop("name")
            recorder.figure(f"{name}, {figures.get('pages', '')} x {title}", **figures)
            if "gb_per_s" in figures:
                recorder.check(f"bytes of {name}, {figures['pages']} x {title}", figures["wrong_pages"] == 0)
                found.append({**figures, "name": name})
    if puller.returncode:
        recorder.figure(f"pull ended, {title}", code=puller.returncode)
    return found


def _judge(recorder: Recorder, found: list[dict[str, float]], *, link: bool) -> None:
    most = max(figures["pages"] for figures in found)
    rates = {str(figures["name"]): figures["gb_per_s"] for figures in found if figures["pages"] == most}
    of_plain = {name: round(rate / rates["plain"], 3) for name, rate in rates.items()}
    recorder.figure("share of one plain copy", **of_plain, best=max(of_plain, key=lambda name: of_plain[name]))
    if link:
        reached = of_plain.get("kernel", 0.0)
        recorder.check(f"a pull of {most} pages by one launch", reached >= _WANTED, reached=reached, wanted=_WANTED)


@contextlib.contextmanager
def _process(command: list[str], gpus: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that ends with its input, or is killed after a while."""
    environment = {**os.environ, VISIBLE: ",".join(gpus)}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    limit = threading.Timer(_LIMIT_S, child.kill)
    limit.start()
    try:
        yield child
    finally:
        child.communicate()
        limit.cancel()
