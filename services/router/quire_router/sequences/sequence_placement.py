"""Where one sequence was placed: the engine's model, what it counts for there, and what is known of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.placement.load_reservation import LoadReservation


class SequencePlacement:
    """Written by the chooser, and by the session that takes the sequence."""

    __slots__ = ("digest", "held_tokens", "load_reservation", "page_hashes")

    def __init__(self) -> None:
        # Of the engine's model; None until an engine was asked to run the sequence.
        self.digest: bytes | None = None
        # Until the engine has begun, or has let go of it; siblings are placed by the first of them.
        self.load_reservation: LoadReservation | None = None
        # Leading tokens whose pages anybody had when it was placed; None: not known.
        self.held_tokens: int | None = None
        # Of the prompt's full pages, by page size, while siblings that share this are placed; empty: not known.
        self.page_hashes: dict[int, list[bytes]] = {}

    def bind_model(self, digest: bytes) -> None:
        """An engine of this very model gets the sequence."""
        self.digest = digest

    def reserve_load(self, reservation: LoadReservation, held_tokens: int | None) -> None:
        """A replica was chosen."""
        self.load_reservation, self.held_tokens = reservation, held_tokens

    def share_held_tokens(self, held_tokens: int | None) -> None:
        """As of the sibling by which it was placed."""
        self.held_tokens = held_tokens

    def release_load(self) -> None:
        """Its prompt is no work ahead of an engine any more. Idempotent."""
        reservation, self.load_reservation = self.load_reservation, None
        if reservation is not None:
            reservation.release()

    def name_pages(self, page_size: int, hashes: list[bytes]) -> None:
        """Its prompt's pages have these hashes."""
        self.page_hashes = {page_size: hashes}

    def forget_pages(self) -> None:
        """It is placed: the hashes of a million tokens are megabytes."""
        self.page_hashes = {}
