"""Where one sequence was placed: the engine's model, what it counts for there, and what is known of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire_router.placement.load_reservation import LoadReservation

# A sequence may go from replica to replica for hours: its last runs are kept.
_MOST_RUNS = 16


class Run(NamedTuple):
    """The sequence was sent to this replica when it had so many tokens."""

    instance: str
    from_token: int


class SequencePlacement:
    """Written by the chooser, and by the session that takes the sequence."""

    __slots__ = ("digest", "held_tokens", "load_reservation", "page_hashes", "runs")

    def __init__(self) -> None:
        # Of the engine's model; None until an engine was asked to run the sequence.
        self.digest: bytes | None = None
        # Until the engine has begun, or has let go of it; siblings are placed by the first of them.
        self.load_reservation: LoadReservation | None = None
        # Leading tokens whose pages anybody had when it was placed; None: not known.
        self.held_tokens: int | None = None
        # Of the prompt's full pages, by page size, while siblings that share this are placed; empty: not known.
        self.page_hashes: dict[int, list[bytes]] = {}
        # The replicas that were asked to run the sequence, in order.
        self.runs: tuple[Run, ...] = ()

    def begin_run(self, instance: str, tokens: int) -> None:
        """Note that this replica gets the sequence, which has so many tokens."""
        self.runs = (*self.runs[1 - _MOST_RUNS :], Run(instance, tokens))

    def bind_model(self, digest: bytes) -> None:
        """Note the model of the engine that gets the sequence."""
        self.digest = digest

    def reserve_load(self, reservation: LoadReservation, held_tokens: int | None) -> None:
        """Keep the load that was reserved at the chosen replica, and `held_tokens` as placement found them."""
        self.load_reservation, self.held_tokens = reservation, held_tokens

    def share_held_tokens(self, held_tokens: int | None) -> None:
        """Copy the `held_tokens` of the sibling by which the sequence was placed."""
        self.held_tokens = held_tokens

    def release_load(self) -> None:
        """Release the reserved load: the prompt is no work ahead of an engine any more. Idempotent."""
        reservation, self.load_reservation = self.load_reservation, None
        if reservation is not None:
            reservation.release()

    def name_pages(self, page_size: int, hashes: list[bytes]) -> None:
        """Keep the hashes of the prompt's full pages, until `forget_pages`."""
        self.page_hashes = {page_size: hashes}

    def forget_pages(self) -> None:
        """Drop the hashes once the sequence is placed: those of a million tokens are megabytes."""
        self.page_hashes = {}
