"""SmolLM2 and Gemma 3 out of their GGUF files: tokens, weights and answers as transformers and the gguf package read
the files.

transformers takes minutes to read the vocabulary of Gemma, so these tests are deep.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from quire_common.gguf import open_gguf
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from quire_worker.loading import LoadedModel, LoadOptions, load_model
from quire_worker.weights.gguf.tensor_values import read_values
from tests.gguf.test_tokenizer import GPT2_WORDS
from tests.gguf.vocabularies import random_texts
from tests.model.batches import PAGE_SIZE, Run, make_batch, pages_for
from tests.oracle import Oracle, quiet_transformers
from tests.parity.real_models import real_model
from tests.tiers import deep_after

ANSWER_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "What is 12 + 30?",
    "Explain gravity in one sentence.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a synonym for 'happy'.",
    "How many days are there in a leap year?",
    "What do bees make?",
    "List two uses of paper.",
    "Is the sun a star?",
    "What is the boiling point of water in Celsius?",
    "Finish the sentence: Once upon a time",
    "def fibonacci(n):",
    "What colour is a ripe banana?",
    "Tell me a short joke.",
    "Which ocean is the largest?",
    "What is the opposite of 'cold'?",
    "Say hello in five languages.",
)


@dataclass(frozen=True)
class RealModel:
    tensors: int
    kinds: frozenset[str]
    """Kinds of blocks that the file has."""
    spoken: str
    """A word of the answer to the first question."""


MODELS = {
    "smollm2": RealModel(272, frozenset(("F32", "Q4_1", "Q8_0")), "Paris"),
    "gemma3-270m": RealModel(236, frozenset(("F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0")), "Paris"),
}


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.deep)])
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def file(name: str) -> Path:
    return real_model(name)


@pytest.fixture(scope="module")
def vocabulary(file: Path) -> Vocabulary:
    return Vocabulary(read_model_files(str(file)))


@pytest.fixture(scope="module")
def oracle(file: Path) -> Oracle:
    return Oracle(file)


@pytest.fixture(scope="module")
def model(file: Path, one_thread: None) -> LoadedModel:
    return load_model(file, LoadOptions(kv_cache_bytes=128 << 20))


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    with quiet_transformers():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def texts_of(vocabulary: Vocabulary) -> list[str]:
    """1,000 texts: of random characters, of random tokens, and questions."""
    random = np.random.default_rng(7)
    tokens = random.integers(len(vocabulary.specials), vocabulary.size, (380, 24))
    whole = [vocabulary.tokenizer.decode(row.tolist()) for row in tokens]
    return [*random_texts(600), *whole, *QUESTIONS]


def test_real_token_ids_are_transformers(name: str, vocabulary: Vocabulary, theirs: Any) -> None:
    texts = texts_of(vocabulary)
    assert len(texts) == 1000
    found = [e.ids for e in vocabulary.tokenizer.encode_batch(texts, add_special_tokens=False)]
    plain: Tokenizer = theirs.backend_tokenizer
    wanted = [e.ids for e in plain.encode_batch(texts, add_special_tokens=False)]
    differ = [text for text, ours, other in zip(texts, found, wanted, strict=True) if ours != other]
    if name == "smollm2":
        assert all(any(a.isspace() and b.isnumeric() for a, b in itertools.pairwise(t)) for t in differ)
        cut = with_single_digits(plain)
        differ = [
            text
            for text, ours, other in zip(texts, found, cut.encode_batch(texts, add_special_tokens=False), strict=True)
            if ours != other.ids
        ]
    assert not differ


def with_single_digits(plain: Tokenizer) -> Tokenizer:
    """llama.cpp's expressions for SmolLM2's pre-tokenizer, in which digits stand alone. transformers takes GPT-2's
    words, which differ where two spaces precede a digit."""
    cut = Tokenizer.from_str(plain.to_str())
    cut.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return cut


def check_weights(path: Path) -> set[str]:
    """Compare all tensors, bit by bit; returns the kinds of blocks that were there."""
    from gguf import GGMLQuantizationType, dequantize

    kinds = set()
    with path.open("rb") as file:
        for place in open_gguf(path).tensors.values():
            file.seek(place.begin)
            raw = np.frombuffer(file.read(place.num_bytes), np.uint8)
            rows = place.shape[0] if len(place.shape) > 1 else 1
            wanted = np.asarray(dequantize(raw.reshape(rows, -1), GGMLQuantizationType[place.kind.name]))
            found = read_values(place)
            assert np.array_equal(found.view(np.uint32), wanted.reshape(place.shape).view(np.uint32)), place.name
            kinds.add(place.kind.name)
    return kinds


def test_real_weights_are_the_gguf_packages(name: str, file: Path) -> None:
    from gguf import GGUFReader

    theirs = [(t.name, t.data_offset, t.n_bytes, t.tensor_type.name) for t in GGUFReader(file).tensors]
    found = open_gguf(file).tensors.values()
    assert [(p.name, p.begin, p.num_bytes, p.kind.name) for p in found] == theirs
    assert len(theirs) == MODELS[name].tensors and check_weights(file) == MODELS[name].kinds


def prompt_of(vocabulary: Vocabulary, theirs: Any, question: str) -> list[int]:
    """A message, where the model has a chat template, else the text."""
    if theirs.chat_template is None:
        return vocabulary.tokenizer.encode(question).ids
    messages = [{"role": "user", "content": question}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def answers(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, together, each to its end or ANSWER_TOKENS."""
    each = 1 + (max(map(len, prompts)) + ANSWER_TOKENS) // PAGE_SIZE
    texts, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    going = list(range(len(prompts)))
    for _ in range(ANSWER_TOKENS):
        runs = [
            Run(texts[i][computed[i] :], computed[i], list(range(1 + i * each, 1 + (i + 1) * each)), sample=True)
            for i in going
        ]
        drawn = model.runner.run(make_batch(runs)).token.tolist()
        for i, token in zip(going, drawn, strict=True):
            computed[i] = len(texts[i])
            texts[i].append(token)
        going = [i for i in going if texts[i][-1] not in model.facts.eos_token_ids]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("count", deep_after(1, [6, len(QUESTIONS)]))
def test_real_greedy_answers_are_transformers(
    name: str, model: LoadedModel, vocabulary: Vocabulary, theirs: Any, oracle: Oracle, count: int
) -> None:
    questions = QUESTIONS[:count]
    prompts = [prompt_of(vocabulary, theirs, question) for question in questions]
    found, ties = answers(model, prompts), 0
    for question, prompt, output in zip(questions, prompts, found, strict=True):
        divergence = oracle.first_divergence(prompt, output)
        assert divergence is None or divergence.is_true_tie, (question, divergence)
        ties += divergence is not None
    assert ties <= 1
    assert MODELS[name].spoken in vocabulary.tokenizer.decode(found[0])


def test_real_logits_are_transformers(model: LoadedModel, oracle: Oracle) -> None:
    """The text is longer than the model's windows."""
    length = 100 + max(model.spec.windows)
    tokens = np.random.default_rng(3).integers(17, model.spec.vocab_size, length).tolist()
    found = model.runner.all_logits(make_batch([Run(tokens, 0, pages_for(len(tokens), 1))]))
    wanted = oracle.logits(tokens)
    assert (found - wanted).abs().max() < 2e-3 and wanted.abs().max() > 10
