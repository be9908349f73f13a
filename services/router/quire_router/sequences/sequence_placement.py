"""The placement of one sequence: the engine's model, the load that is reserved there, and what is known of its KV
pages."""

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
    """The placement of one sequence. The chooser, migration, and the session that has the sequence write it."""

    __slots__ = ("digest", "held_tokens", "load_reservation", "page_hashes", "runs")

    def __init__(self) -> None:
        # The digest of the engine's model; None until an engine was asked to run the sequence.
        self.digest: bytes | None = None
        # Kept until the engine sends a row or drops the sequence. Of siblings, only the first has the reservation.
        self.load_reservation: LoadReservation | None = None
        # The number of leading tokens whose pages some engine or kvstore had at the placement; None: not known.
        self.held_tokens: int | None = None
        # The hashes of the prompt's full pages, by page size, while the siblings are placed; empty: not known.
        self.page_hashes: dict[int, list[bytes]] = {}
        # The replicas that were asked to run the sequence, in order.
        self.runs: tuple[Run, ...] = ()

    def begin_run(self, instance: str, tokens: int) -> None:
        """Note that the sequence, with so many tokens, is sent to this replica. The last 16 such runs are kept."""
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
        """Release the reserved load, because the engine need not compute the prompt any more, or has dropped the
        sequence. Idempotent."""
        reservation, self.load_reservation = self.load_reservation, None
        if reservation is not None:
            reservation.release()

    def name_pages(self, page_size: int, hashes: list[bytes]) -> None:
        """Keep the hashes of the prompt's full pages, until `forget_pages`."""
        self.page_hashes = {page_size: hashes}

    def forget_pages(self) -> None:
        """Drop the hashes when the sequence is placed, because the hashes of a million tokens take megabytes."""
        self.page_hashes = {}
