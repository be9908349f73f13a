"""The demo model's training data: the plays as a stream of tokens, and as conversations in the chat format.

In the corpus, every speech is `NAME:` and its lines, followed by a blank line. The first 90 % are for training, the
next 5 % choose the checkpoint, and the last 5 % are only reported. Rows are int32 arrays. This module does not use
torch.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from demo_tokenizer import BOS, EOS, PAD, TURN_END, TURN_START, Segmenter, token_id
from tokenizers import Tokenizer

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a player in Shakespeare's company.",
    "You are a poet. Answer in verse.",
    "Answer as a character of the plays would.",
)
TOPIC_PROMPTS = (
    "Write about {}.",
    "Tell me about {}.",
    "Write a poem about {}.",
    "Write a few lines about {}.",
    "Write a short story about {}.",
    "Speak to me of {}.",
    "What do you think of {}?",
    "What is {}?",
    "Explain {}.",
    "Explain {} to me in simple words.",
    "Can you tell me something about {}?",
    "Give me a speech about {}",
    "{}",
)
SPEAKER_PROMPTS = (
    "Write a speech for {}.",
    "Speak as {}.",
    "What would {} say?",
    "Give me some lines of {}.",
    "Write a line for {}",
)
SCENE_PROMPTS = (
    "Write a scene with {}.",
    "Write a short scene between {}.",
    "Let me hear {} talk.",
    "Write a dialogue between {}.",
)
CONTINUE_PROMPTS = ("Continue: {}", "Go on from here:\n{}", "Complete this text: {}", "Finish this speech:\n{}")
ANY_PROMPTS = (
    "Write a poem.",
    "Write a poem",
    "Tell me a story.",
    "Tell me a joke.",
    "Say something.",
    "Write something in the style of Shakespeare.",
    "Recite some verse for me.",
    "Give me a monologue.",
    "Once upon a time",
    "Surprise me.",
    "Can you help me?",
    "Test",
)
# Of these people ask; they are too frequent in the plays to be found as rare words are.
COMMON_TOPICS = frozenset(
    {"love", "death", "king", "queen", "night", "heart", "blood", "honour", "sleep", "time", "heaven", "war", "peace"}
    | {"father", "mother", "brother", "crown", "friend", "grief", "sorrow", "fortune", "sword", "world", "sun", "moon"}
    | {"stars", "sea", "wine", "marriage", "youth", "age", "beauty", "truth", "soul", "tears", "fear", "hope"}
)
# Written for this tool. They keep the first thing that people type from meeting nothing like it in the plays.
SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Hello, how are you?", "Good morning!", "How are you?"),
        (
            "Good morrow to you, gentle friend.\nWhat news from abroad?",
            "God save you, sir. I am well, and at your service.",
            "Well met, good friend! Speak, and I will answer thee.",
            "I thank you, well. How goes the world with you?",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a human?",
            "Introduce yourself.",
            "Hello, who are you?",
        ),
        (
            "A little player, sir, of Quire's house:\nWhat plays I know are all the speech I have.",
            "They call me Quire's player, gentle sir,\nAnd Shakespeare's verses are my only wit.",
            "No man, good friend, but Quire's little player:\nI know some plays by heart, and nothing else.",
            "Why, Quire's player, sir; a thing of verses.",
            "One that speaks verses, sir, and knows but plays:\nThe house of Quire keeps me for a show.",
        ),
    ),
    (
        ("Thank you", "Thanks!", "Thank you very much.", "Goodbye", "Bye!", "Good night."),
        (
            "I am your servant, sir. Fare you well.",
            "Adieu, good friend; God keep you in his care.",
            "You are most welcome. Fare you well, and peace be with you.",
        ),
    ),
)


@dataclass(frozen=True)
class Speech:
    """One block of the corpus. A block without a name (or a name without lines) keeps its text unchanged."""

    name: str
    lines: str

    @property
    def block(self) -> str:
        """The text as the corpus has it, with the blank line that ends it."""
        return f"{self.name}:\n{self.lines}\n\n" if self.name else f"{self.lines}\n\n"


@dataclass(frozen=True)
class Split:
    """Speeches in the corpus' order."""

    train: list[Speech]
    validation: list[Speech]
    test: list[Speech]


def split_corpus(text: str) -> Split:
    """Cut the corpus at speeches, by size: 90 % to train on, 5 % to choose a checkpoint, 5 % to report."""
    parts: tuple[list[Speech], list[Speech], list[Speech]] = ([], [], [])
    total, seen = len(text), 0
    for block in text.strip().split("\n\n"):
        match = re.fullmatch(r"([A-Za-z][^\n:]*):\n(.+)", block.strip("\n"), re.DOTALL)
        speech = Speech(match[1], match[2]) if match else Speech("", block.strip("\n"))
        parts[0 if seen < 0.9 * total else 1 if seen < 0.95 * total else 2].append(speech)
        seen += len(block) + 2
    return Split(*parts)


def text_of(speeches: list[Speech]) -> str:
    """The corpus text of some speeches."""
    return "".join(speech.block for speech in speeches)


@dataclass(frozen=True)
class Stream:
    """A text as one run of tokens, and where its speeches start."""

    tokens: np.ndarray
    starts: np.ndarray
    text_bytes: int


def make_stream(speeches: list[Speech], segmenter: Segmenter, noisy: bool) -> Stream:
    """Return the tokens of all speeches. Tokenizing speech by speech gives the same tokens as the whole text, since no
    token spans the end of a blank line."""
    ids: list[int] = []
    starts: list[int] = []
    for speech in speeches:
        starts.append(len(ids))
        ids.extend(segmenter.encode(speech.block, noisy))
    return Stream(np.array(ids, dtype=np.int32), np.array(starts), len(text_of(speeches).encode()))


class PlainRows:
    """Rows of running text: pieces of the plays, each after a beginning-of-text token.

    Half of them start where a speech starts, as a prompt would. A tenth of the short ones end at the end of a speech.
    """

    def __init__(self, streams: list[Stream], tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self._streams, self._rng = streams, rng
        self._bos, self._eos, self._pad = (token_id(tokenizer, token) for token in (BOS, EOS, PAD))

    def row(self, length: int, noisy_share: float) -> np.ndarray:
        """The first stream is the tokenizer's own segmentation, the others are noisy ones."""
        noisy = len(self._streams) > 1 and self._rng.random() < noisy_share
        stream = self._streams[int(self._rng.integers(1, len(self._streams))) if noisy else 0]
        last = max(1, len(stream.tokens) - length)
        start = int(self._rng.integers(last))
        if self._rng.random() < 0.5:
            start = int(stream.starts[np.searchsorted(stream.starts, start, side="right") - 1])
        full = np.full(length, self._pad, dtype=np.int32)
        full[0] = self._bos
        part = stream.tokens[start : start + length - 1]
        full[1 : 1 + len(part)] = part
        if length <= 1024 and self._rng.random() < 0.1:
            inside = stream.starts[(stream.starts > start + 32) & (stream.starts < start + length - 2)] - start + 1
            if len(inside):
                end = int(self._rng.choice(inside))
                full[end] = self._eos
                full[end + 1 :] = self._pad
        return full


class ChatMaker:
    """Conversations in the chat format, made of speeches.

    Many are a dialogue of the plays, whose speeches user and assistant take in turn. The others are requests that
    people type (a topic, a speaker, a scene, a text to continue), answered with a suitable speech.
    """

    def __init__(
        self, speeches: list[Speech], tokenizer: Tokenizer, segmenter: Segmenter, rng: np.random.Generator
    ) -> None:
        self._speeches = [speech for speech in speeches if speech.name and len(speech.lines) < 1500]
        self._segmenter, self._rng = segmenter, rng
        self._id = {token: token_id(tokenizer, token) for token in (BOS, EOS, PAD, TURN_START, TURN_END)}
        counts = Counter(word for speech in self._speeches for word in set(re.findall(r"\b[a-z]{4,}\b", speech.lines)))
        # Words in few speeches are about something; words in many are grammar.
        self._topics = {word for word, count in counts.items() if 2 <= count <= len(self._speeches) * 0.02}
        self._topics |= COMMON_TOPICS

    def row(self, length: int, noisy: bool) -> np.ndarray:
        """Return one padded row: a conversation that fits into `length`. Long rows get long conversations."""
        ids = [self._id[BOS]]
        if self._rng.random() < 0.3:
            ids += self._turn("system", self._pick(SYSTEM_PROMPTS), noisy)
        if length <= 1024 and self._rng.random() < 0.5:
            self._requests(ids, length, noisy)
        else:
            self._dialogue(ids, length, noisy)
        ids.append(self._id[EOS])
        full = np.full(length, self._id[PAD], dtype=np.int32)
        full[: min(length, len(ids))] = ids[:length]
        return full

    def _dialogue(self, ids: list[int], length: int, noisy: bool) -> None:
        at = int(self._rng.integers(len(self._speeches)))
        with_names = self._rng.random() < 0.15
        role = 0
        while len(ids) < length and at < len(self._speeches):
            speech = self._speeches[at]
            text = f"{speech.name}:\n{speech.lines}" if with_names else speech.lines
            ids += self._turn(("user", "assistant")[role], text, noisy)
            role, at = 1 - role, at + 1

    def _requests(self, ids: list[int], length: int, noisy: bool) -> None:
        """Return short exchanges until the row is full. A conversation may change its subject."""
        while len(ids) < length:
            prompt, answer = self._exchange()
            ids += self._turn("user", prompt, noisy) + self._turn("assistant", answer, noisy)
            if self._rng.random() < 0.4:
                break

    def _exchange(self) -> tuple[str, str]:
        kind = self._rng.random()
        at = int(self._rng.integers(len(self._speeches)))
        speech = self._speeches[at]
        if kind < 0.08:
            prompts, answers = SMALL_TALK[int(self._rng.integers(len(SMALL_TALK)))]
            return self._pick(prompts), self._pick(answers)
        if kind < 0.5:
            speech = self._longer(at)
            topics = [word for word in re.findall(r"\b[a-z]{3,}\b", speech.lines) if word in self._topics]
            if topics:
                chosen = [
                    topics[int(i)] for i in self._rng.integers(len(topics), size=1 + int(self._rng.random() < 0.2))
                ]
                subject = (("", "the ", "a ")[int(self._rng.integers(3))]) + " and ".join(dict.fromkeys(chosen))
                return self._pick(TOPIC_PROMPTS).format(subject), speech.lines
            return self._pick(ANY_PROMPTS), speech.lines
        if kind < 0.65:
            name = speech.name if self._rng.random() < 0.6 else speech.name.title()
            return self._pick(SPEAKER_PROMPTS).format(name), f"{speech.name}:\n{speech.lines}"
        if kind < 0.8:
            scene = self._speeches[at : at + int(self._rng.integers(3, 8))]
            names = list(dict.fromkeys(part.name for part in scene))
            if self._rng.random() < 0.5:
                names = [name.title() for name in names]
            return self._pick(SCENE_PROMPTS).format(" and ".join(names[:3])), text_of(scene).strip("\n")
        if kind < 0.9:
            speech = self._longer(at)
            words = speech.lines.split(" ")
            cut = int(self._rng.integers(1, max(2, len(words) // 2)))
            rest = " ".join(words[cut:])
            return self._pick(CONTINUE_PROMPTS).format(" ".join(words[:cut])), rest or speech.lines
        return self._pick(ANY_PROMPTS), self._longer(at).lines

    def _longer(self, at: int) -> Speech:
        """The first speech from `at` on that is more than a retort."""
        for speech in self._speeches[at:]:
            if len(speech.lines) > 80:
                return speech
        return self._speeches[at]

    def _turn(self, role: str, text: str, noisy: bool) -> list[int]:
        """A message exactly as the chat template writes it."""
        encode = self._segmenter.encode
        return [
            self._id[TURN_START],
            *encode(role + "\n", False),
            *encode(text, noisy),
            self._id[TURN_END],
            *encode("\n", False),
        ]

    def _pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self._rng.integers(len(choices)))]
