"""A matcher in this process: the real client, ring and grammars, and in the process's place an object that hears frames
when a test says so, and that a test may lose."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llguidance import LLTokenizer, TokenizerWrapper

from quire_worker.matcher.crash_record import CrashRecord
from quire_worker.matcher.guidance_backend import GuidanceBackend, GuidanceGrammar
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher import Matcher
from quire_worker.matcher.matcher_client import MatcherClient
from quire_worker.matcher.matcher_pool import MatcherPool
from quire_worker.matcher.matcher_threads import InlineExecutor, MatcherThread
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.side_process.process_link import ProcessLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quire_worker.sampling.token_mask import TokenMask
    from quire_worker.side_process.frames import Frame


class LetterTokens:
    """A tokenizer for llguidance: every token of a small vocabulary is a character, but for the eos tokens."""

    bos_token_id = None

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = list(eos_token_ids)
        self.tokens = [
            f"<{token}>".encode() if token in eos_token_ids else chr(ord("0") + token).encode()
            for token in range(vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, str) else text.decode(errors="replace")
        return [(ord(letter) - ord("0")) % len(self.tokens) for letter in data]


class ProcessEnded(Exception):
    """Raised in the process's place by a grammar that ends it."""


class CrashingBackend(GuidanceBackend):
    """Grammars that contain `deadly` end the process when they are compiled, and those that contain `fatal` with their
    third token."""

    @classmethod
    def like(cls, backend: GuidanceBackend) -> CrashingBackend:
        """A backend of the same tokens."""
        made = cls.__new__(cls)
        vars(made).update(vars(backend))
        return made

    def compile_grammar(self, text: str) -> tuple[GuidanceGrammar, int]:
        if "deadly" in text:
            raise ProcessEnded
        grammar, elapsed_ns = super().compile_grammar(text)
        return (CrashingGrammar.like(grammar) if "fatal" in text else grammar), elapsed_ns


class CrashingGrammar(GuidanceGrammar):
    """Ends the process with its third token."""

    @classmethod
    def like(cls, grammar: GuidanceGrammar) -> CrashingGrammar:
        """Return a grammar in the same state that ends the process."""
        made = cls.__new__(cls)
        vars(made).update(vars(grammar), fed=0)
        return made

    fed: int

    def accept_tokens(self, tokens: Iterable[int]) -> None:
        given = list(tokens)
        self.fed += len(given)
        if self.fed >= 3:
            raise ProcessEnded
        super().accept_tokens(given)


def letter_backend(vocab_size: int, eos_token_ids: Sequence[int]) -> GuidanceBackend:
    """Grammars over a vocabulary of characters: token t is the character of the code 48 + t."""
    eos = list(eos_token_ids)
    tokenizer = LLTokenizer(TokenizerWrapper(LetterTokens(vocab_size, eos)), n_vocab=vocab_size, eos_token=eos)
    return GuidanceBackend(tokenizer, vocab_size, eos)


@dataclass
class LocalLink:
    """A MatcherLink. `on_send` is called for each frame of the engine, which `hear` lets the matcher have."""

    backend: GuidanceBackend
    ring: MaskRing
    on_frames: Callable[[], None]
    on_send: Callable[[LocalLink], None]
    make_matcher: Callable[..., Matcher] = Matcher
    heard: list[Frame] = field(default_factory=list)
    incarnation: int = 1
    gave_up: list[str] = field(default_factory=list)
    losses: int = 0

    def __post_init__(self) -> None:
        self.unheard: deque[Frame] = deque()
        self._told: deque[Frame | ProcessLost] = deque()
        self.matcher = self._new_matcher()

    @property
    def pid(self) -> None:
        """There is no process."""
        return

    def send(self, incarnation: int, frame: Frame) -> bool:
        if incarnation != self.incarnation:
            return False
        self.unheard.append(frame)
        self.on_send(self)
        return True

    def hear(self) -> bool:
        """Let the matcher have the next frame; False: there is none."""
        if not self.unheard:
            return False
        frame = self.unheard.popleft()
        self.heard.append(frame)
        try:
            self.matcher.receive(frame)
        except ProcessEnded:
            self.lose()
        return True

    def lose(self, busy: Sequence[int] = (), *, had_process: bool = True) -> None:
        """End the process, and all that it holds, while it works on these sequences. The next one is there at once.
        `had_process`: see ProcessLost."""
        for thread, generation in enumerate(busy):
            self.ring.set_busy(thread, generation)
        self.incarnation += 1
        self.losses += 1
        self.unheard.clear()
        self.matcher = self._new_matcher()
        self._tell(ProcessLost(had_process))

    def take_frame(self) -> Frame | ProcessLost | None:
        return self._told.popleft() if self._told else None

    def give_up(self, incarnation: int, why: str) -> None:
        self.gave_up.append(why)

    def close(self) -> None: ...

    def _tell(self, frame: Frame | ProcessLost) -> None:
        self._told.append(frame)
        self.on_frames()

    def _new_matcher(self) -> Matcher:
        return self.make_matcher(
            self.backend,
            self.ring,
            self._tell,
            {thread: InlineExecutor(thread, self.ring) for thread in MatcherThread},
        )


class LocalMatcher:
    """A MatcherClient over a LocalLink; with several processes, a MatcherPool of such clients. With `prompt`, a process
    hears every frame at once. `row_tokens`: the most tokens of a row."""

    def __init__(
        self,
        backend: GuidanceBackend,
        vocab_size: int,
        mask_slots: int = 8,
        *,
        prompt: bool = True,
        clock: Callable[[], float] = time.monotonic,
        processes: int = 1,
        row_tokens: int = 1,
        make_matcher: Callable[..., Matcher] = Matcher,
    ) -> None:
        self.prompt = prompt
        self.ring = MaskRing.create(mask_slots, 2 * row_tokens, vocab_size)
        self._make_matcher = make_matcher
        self.backend = backend
        self.links: list[LocalLink] = []
        self.on_send: Callable[[LocalLink], None] = self._hear
        crashes = CrashRecord(clock)
        self.clients = [
            MatcherClient(
                ring,
                self._link_maker(ring),
                clock,
                mask_slots=range(number, mask_slots, processes),
                crashes=crashes.for_another_process(),
                lookahead=2 * row_tokens - 1 if row_tokens > 1 else 0,
            )
            for number, ring in enumerate([self.ring, *map(self.ring.of_process, range(1, processes))])
        ]
        self.client = self.clients[0] if processes == 1 else MatcherPool(self.clients)

    @property
    def link(self) -> LocalLink:
        """The link to the first process, once there is one."""
        return self.links[0]

    @property
    def sequences(self) -> int:
        """The number of sequences that have a mask slot, or wait for one."""
        return sum(client.sequences for client in self.clients)

    def _link_maker(self, ring: MaskRing) -> Callable[[Callable[[], None]], LocalLink]:
        def make_link(on_frames: Callable[[], None]) -> LocalLink:
            self.links.append(LocalLink(self.backend, ring, on_frames, self._sent, self._make_matcher))
            return self.links[-1]

        return make_link

    def _sent(self, link: LocalLink) -> None:
        self.on_send(link)

    def _hear(self, link: LocalLink) -> None:
        while self.prompt and link.hear():
            pass


class FixedMask(RowConstraint):
    """The constraint of one row whose mask is known."""

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask

    def mask_at(self, position: int) -> TokenMask:
        return self._mask


def masks_after(backend: GuidanceBackend, text: str) -> Callable[[list[int]], TokenMask]:
    """The mask behind any output of a sequence with this grammar: what `paced_tokens` asks for."""

    def mask(output: list[int]) -> TokenMask:
        grammar, _ = backend.compile_grammar(text)
        grammar.accept_tokens(output)
        return grammar.compute_mask()

    return mask
