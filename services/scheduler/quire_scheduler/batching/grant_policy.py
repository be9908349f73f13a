"""How much credit to give and when: what lockstep and free-running differ in, and all that they differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire_common.credit import Budget
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from quire_common.credit import Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig

TOKENS_PER_STEP = 8192
CPU_TOKENS_PER_STEP = 512
# The design's page on CPU; a worker that does not name its device is told by it.
_CPU_PAGE_SIZE = 16
log = get_logger(__name__)


class GrantPolicy(Protocol):
    """Decides, per Grant, whether one may be sent, how far slots may run and how many sequences may hold slots.

    Positions that are given beyond those known (`lead`, `slack`) are given only while pages last. `granted` hears
    every Grant that was made, `reported` every Report of the epoch before anyone else. Called from one thread; sees no
    requests and no pages.
    """

    rows: int
    """Sequences that may decode in one step."""

    def may_grant(self) -> bool:
        """Whether a Grant may be sent now."""

    def lead(self) -> int:
        """Positions past the known ones that a slot should be able to compute at any time."""

    def slack(self) -> int:
        """Positions that a slot gets on top when it gets any, so that Grants need not follow each other closely."""

    def most_started(self, ending: int) -> int:
        """Sequences that may hold a slot at once; `ending` of them are sure to end within the lead."""

    def most_spare_tokens(self) -> int:
        """Prompt tokens that may wait in slots beyond `rows`."""

    def worth_a_step(self) -> bool:
        """Whether a Grant that changes nothing should be sent while slots are held, for the step that it allows."""

    def budget(self) -> Budget | None:
        """Bounds of the steps from the next Grant on; None where they stay."""

    def granted(self, seq: int) -> None:
        """A Grant was made."""

    def reported(self, report: Report) -> None:
        """A Report came."""


def make_budget(config: SchedulerConfig, hello: WorkerHello, step_limit: int) -> Budget:
    """Return the configured bounds of a step, cut to the worker's room, with a warning where they are cut. Without a
    configured number of tokens it is the worker's room, or else a default for its device."""
    room = hello.max_step_tokens
    if 0 < room < config.max_num_batched_tokens:
        log.warning("steps are smaller than configured", configured=config.max_num_batched_tokens, room=room)
    tokens = config.max_num_batched_tokens or room or (CPU_TOKENS_PER_STEP if on_cpu(hello) else TOKENS_PER_STEP)
    tokens = min(tokens, room) if room else tokens
    return Budget(
        tokens_per_step=tokens,
        prefill_tokens_beside_decoders=config.prefill_tokens_beside_decoders or tokens,
        chunk_cap=config.long_prefill_token_threshold or tokens,
        partial_prefills=config.max_num_partial_prefills,
        step_limit=step_limit,
    )


def most_rows(config: SchedulerConfig, hello: WorkerHello) -> int:
    """Sequences that may decode in one step, by the configuration and by what the worker can."""
    return min(config.max_num_seqs or hello.max_num_seqs, hello.max_num_seqs, hello.num_slots)


def on_cpu(hello: WorkerHello) -> bool:
    """Whether the worker computes on a CPU, where a step of 8192 tokens would take seconds."""
    devices = [name for name in hello.capabilities if name in ("cpu", "cuda")]
    return devices == ["cpu"] if devices else hello.model.pages.page_size <= _CPU_PAGE_SIZE
