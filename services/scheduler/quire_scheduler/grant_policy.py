"""How much credit to give and when: the one object that free-running replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire_common.credit import Budget

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit import Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig

TOKENS_PER_STEP = 8192
CPU_TOKENS_PER_STEP = 512
# The design's page on CPU; a worker that does not name its device is told by it.
_CPU_PAGE_SIZE = 16


class GrantPolicy(Protocol):
    """Decides, per Grant, whether one may be sent, how far slots may run and how many sequences may hold slots.

    The planner asks `may_grant`, `most_started`, `target`, `worth_a_step` and `budget` in this order, then tells
    `granted`. `reported` hears every Report of the epoch before anyone else. Called from one thread; sees no requests
    and no pages.
    """

    def may_grant(self) -> bool:
        """Whether a Grant may be sent now."""

    def target(self, known_len: NDArray[Any]) -> NDArray[Any]:
        """Positions that slots should be able to compute, given prompt and output tokens seen; at least `known_len`.

        What goes beyond `known_len` is given only while pages are plentiful.
        """

    def most_started(self) -> int:
        """Sequences that may hold a slot at once."""

    def worth_a_step(self) -> bool:
        """Whether a Grant that changes nothing should be sent while slots are held, for the step that it allows."""

    def budget(self) -> Budget:
        """Bounds of the steps under the next Grant."""

    def granted(self, seq: int) -> None:
        """A Grant was made."""

    def reported(self, report: Report) -> None:
        """A Report came."""


def make_budget(config: SchedulerConfig, hello: WorkerHello, step_limit: int) -> Budget:
    """The configured bounds of a step."""
    tokens = config.max_num_batched_tokens or (CPU_TOKENS_PER_STEP if on_cpu(hello) else TOKENS_PER_STEP)
    return Budget(
        tokens_per_step=tokens,
        prefill_tokens_beside_decoders=config.prefill_tokens_beside_decoders or tokens,
        chunk_cap=config.long_prefill_token_threshold or tokens,
        partial_prefills=config.max_num_partial_prefills,
        step_limit=step_limit,
    )


def on_cpu(hello: WorkerHello) -> bool:
    """Whether the worker computes on a CPU, where a step of 8192 tokens would take seconds."""
    devices = [name for name in hello.capabilities if name in ("cpu", "cuda")]
    return devices == ["cpu"] if devices else hello.model.pages.page_size <= _CPU_PAGE_SIZE
