"""GrantPolicy: decides how much credit (positions that the worker may compute) Grants give, and when. There are two
policies, lockstep and free running, and they differ only in this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire_common.credit import Budget
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from quire_common.credit import Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig

TOKENS_PER_STEP = 8192
CPU_TOKENS_PER_STEP = 512
# The page size that the design uses on a CPU. A worker that does not name its device is recognised by it.
_CPU_PAGE_SIZE = 16
log = get_logger(__name__)


class GrantPolicy(Protocol):
    """Decides, for each Grant, whether it may be sent, how far slots may run and how many sequences may hold slots.

    Credit beyond the known positions (`lead`, `slack`) is given only while there are enough pages. `granted` is called
    for every Grant that was made, and `reported` for every Report of the epoch except heartbeats, before any other part
    handles it. All methods are called from one thread. A policy sees no requests and no pages.
    """

    rows: int
    """Sequences that may decode in one step."""

    def may_grant(self) -> bool:
        """Whether a Grant may be sent now."""

    def lead(self) -> int:
        """Return how many positions past its known ones a slot should be able to compute at any time."""

    def extra_lead(self) -> int:
        """Return how many positions more than `lead` a slot whose sequence has a grammar should be able to compute."""

    def slack(self) -> int:
        """Return how many positions a slot gets in addition whenever it gets any, so that fewer Grants are needed."""

    def most_started(self, ending: int) -> int:
        """Return how many sequences may hold a slot at once, given that `ending` of them are sure to end within the
        lead."""

    def most_spare_tokens(self) -> int:
        """Return how many prompt tokens may still be to compute, in all slots together, after a sequence is started
        beyond `rows`. If no others are to compute, its prompt may be longer."""

    def worth_a_step(self) -> bool:
        """Whether a Grant that changes nothing should be sent while slots are held, because it permits a step."""

    def budget(self) -> Budget | None:
        """Return the limits of the steps from the next Grant on; None if they stay as they are."""

    def granted(self, seq: int) -> None:
        """Note that Grant `seq` was made."""

    def reported(self, report: Report) -> None:
        """Note that a Report came."""


def make_budget(config: SchedulerConfig, hello: WorkerHello, step_limit: int) -> Budget:
    """Return the limits of a step. `step_limit` is the number of steps that one Grant allows; 0 is no limit.

    A step has the configured number of tokens, but no more than the worker has room for (`hello.max_step_tokens`; 0:
    not known). A warning is logged if the room is less than the configured number. Without a configured number, a step
    fills the room or, if that is not known, has 512 tokens on a CPU and 8192 elsewhere. If the most prefill tokens
    beside decoders, or the longest chunk of a prompt, are not configured, each is the whole step.
    """
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
    """Return how many sequences may decode in one step, by the configuration (0: no limit) and by the worker's
    limits."""
    return min(config.max_num_seqs or hello.max_num_seqs, hello.max_num_seqs, hello.num_slots)


def on_cpu(hello: WorkerHello) -> bool:
    """Whether the worker computes on a CPU, where a step of 8192 tokens would take seconds. A worker that names no
    device counts as a CPU if its pages have at most 16 tokens."""
    devices = [name for name in hello.capabilities if name in ("cpu", "cuda")]
    return devices == ["cpu"] if devices else hello.model.pages.page_size <= _CPU_PAGE_SIZE
