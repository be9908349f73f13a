"""`grammar_capabilities` decides whether a worker applies grammars, and `make_matcher` makes its MatcherPool. Only the
matcher's processes, and one that tests the tokenizer, import llguidance."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.gguf import is_gguf
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.structured.constraint import LLGUIDANCE_VERSION
from quire_common.telemetry import metrics
from quire_common.telemetry.logs import get_logger, identity
from quire_worker.matcher.crash_record import CrashRecord
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher_client import MatcherClient
from quire_worker.matcher.matcher_pool import MatcherPool
from quire_worker.matcher.setup import MatcherSetup
from quire_worker.matcher.wire import MatcherFrameKind
from quire_worker.side_process.frames import Frame
from quire_worker.side_process.process_link import LinkTimeouts, ProcessKind, ProcessLink
from quire_worker.threads.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import ModelInfo
    from quire_worker.config import WorkerConfig

log = get_logger(__name__)
COMMAND = (sys.executable, "-m", "quire_worker.matcher")
CHECK_COMMAND = (sys.executable, "-m", "quire_worker.matcher.vocabulary")
CHECK_TIMEOUT_S = 120.0
_MAX_CAUSE_CHARS = 500
TOKENIZER_FILE = "tokenizer.json"
GPU_PROCESSES = 8
# Address space for the grammars of all processes, and at least so much for each.
GRAMMAR_BYTES = 4 << 30
LEAST_GRAMMAR_BYTES = 1 << 30
# Sequences pause while a process hangs, so that it is replaced after three seconds without an answer. A process that
# starts has sixty seconds, since a large vocabulary takes long to load on a busy machine.
TIMEOUTS = LinkTimeouts(silent_pings=6, start_pings=120)


def grammar_capabilities(config: WorkerConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> tuple[str, ...]:
    """Return the capability STRUCTURED_OUTPUT, or an empty tuple if the worker cannot apply grammars. Grammars need the
    right version of llguidance, an EOS token, and a tokenizer that llguidance can read; problems of llguidance are
    logged. A folder without tokenizer.json has none, without a log line. Blocks, for at most CHECK_TIMEOUT_S, while
    another process reads the tokenizer. `max_constrained_seqs` 0 switches grammars off."""
    model = Path(config.model)
    if not (config.max_constrained_seqs and config.model and eos_token_ids):
        return ()
    if not (is_gguf(model) or (model / TOKENIZER_FILE).is_file()):
        return ()
    try:
        installed = metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != LLGUIDANCE_VERSION:
        log.warning("no structured output", llguidance=installed, wanted=LLGUIDANCE_VERSION)
        return ()
    if problem := _tokenizer_problem(model, vocab_size, eos_token_ids):
        log.warning("no structured output", cause=problem)
        return ()
    return (STRUCTURED_OUTPUT,)


def _tokenizer_problem(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> str:
    """Test in another process whether llguidance can read the model's tokenizer within CHECK_TIMEOUT_S. Returns the
    problem, or an empty text."""
    arguments = [str(model), str(vocab_size), *map(str, eos_token_ids)]
    try:
        done = subprocess.run(
            [*CHECK_COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"The tokenizer could not be read within {CHECK_TIMEOUT_S:g} s."
    if done.returncode == 0:
        return ""
    return (done.stdout.strip() or done.stderr.strip())[-_MAX_CAUSE_CHARS:] or f"exit code {done.returncode}"


def make_matcher(config: WorkerConfig, model: str, info: ModelInfo, device: str, row_tokens: int = 1) -> MatcherPool:
    """Make the engine's side of the matcher for the model at this path, on the device cpu or cuda: a mask ring, and a
    client for each process. `row_tokens`: the most tokens that a sequence with a grammar may sample in a step; if it is
    1, there are no lookahead masks. `max_constrained_seqs` must not be 0. There are as many processes as the
    configuration or the device says, at most one per mask slot. The mask slots are divided evenly among them; all share
    the refusals of grammars. The processes are started when the first sequence has a grammar."""
    mask_slots, crashes = config.max_constrained_seqs, CrashRecord(time.monotonic)
    count = min(config.matcher_processes or _processes_on(device), mask_slots)
    # A step reads the masks of a row while the matcher writes those of the next row.
    ring = MaskRing.create(mask_slots, 2 * row_tokens, info.vocab_size)
    rings = [ring, *(ring.of_process(number) for number in range(1, count))]
    return MatcherPool(
        [
            MatcherClient(
                each,
                _link_maker(config, model, info, each, max(GRAMMAR_BYTES // count, LEAST_GRAMMAR_BYTES)),
                mask_slots=range(each.process, mask_slots, count),
                crashes=crashes.for_another_process(),
                # Rows of one token have no drafts, so no step reads lookahead masks.
                lookahead=2 * row_tokens - 1 if row_tokens > 1 else 0,
            )
            for each in rings
        ]
    )


def _processes_on(device: str) -> int:
    """Return the default number of processes: 1 on a CPU, half of the usable cores on a GPU, at most GPU_PROCESSES. A
    GPU computes a step in a millisecond or two, and the matcher has to compute hundreds of masks in this time."""
    return max(1, min(GPU_PROCESSES, usable_cores() // 2)) if device == "cuda" else 1


def _link_maker(
    config: WorkerConfig, model: str, info: ModelInfo, ring: MaskRing, grammar_bytes: int
) -> Callable[[Callable[[], None]], ProcessLink]:
    """Return a function that starts the process of this ring, and calls its argument when frames or pings come.
    `grammar_bytes`: the memory that its grammars may take. Restarts are counted in the metrics, and frames that the
    engine sends once it has learned of a loss reach the next process; earlier ones are dropped."""
    setup = MatcherSetup(
        model=model,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        mask_slots=ring.mask_slots,
        entries_per_slot=ring.entries_per_slot,
        process=ring.process,
        grammar_bytes=grammar_bytes,
        instance=identity()[1] or config.instance,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    restarts = metrics.counter("quire_worker_matcher_restarts_total", "Matchers that ended or hung")
    kind = ProcessKind(
        "the matcher", COMMAND, MatcherFrameKind, "matcher-link", restarts.inc, buffers_while_restarting=True
    )
    frame = Frame(MatcherFrameKind.SETUP, payload=setup.to_json())

    def make_link(on_frames: Callable[[], None]) -> ProcessLink:
        # A ping wakes the engine too: a sequence may wait for a mask that never comes while nothing else happens.
        return ProcessLink(kind, frame, {"--ring": ring.fd}, on_frames, TIMEOUTS, on_ping=on_frames)

    return make_link
