"""Grammars over real vocabularies: masks are functions of the tokens, bounded, and end a complete answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.models import find_model
from quire_common.errors import ConfigError
from quire_worker.matcher.guidance_backend import GrammarError, GuidanceBackend, GuidanceGrammar
from quire_worker.matcher.vocabulary import load_vocabulary
from quire_worker.sampling.token_mask import MaskKind
from tests.fakes.worker.local_matcher import letter_backend
from tests.gguf.vocabularies import TextFile
from tests.unit.tokenizer import folders

VOCAB, EOS = 4096, (1, 4)
SCHEMA = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}}, "required": ["n", "s"]}
)


@pytest.fixture(scope="module")
def backend() -> GuidanceBackend:
    return GuidanceBackend(load_vocabulary(find_model(None), VOCAB, EOS), VOCAB, EOS)


def allowed(grammar: GuidanceGrammar, vocab_size: int = VOCAB) -> list[int]:
    return np.flatnonzero(~grammar.compute_mask().forbidden(vocab_size)).tolist()


def walk(backend: GuidanceBackend, text: str, seed: int) -> list[int]:
    """An answer of tokens that were chosen at random among those that are allowed."""
    rng = np.random.default_rng(seed)
    grammar, _ = backend.compile_grammar(text)
    found: list[int] = []
    while len(found) < 400:
        found.append(int(rng.choice(allowed(grammar))))
        if found[-1] in EOS:
            return found
        grammar.accept_tokens(found[-1:])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_answers_of_allowed_tokens_match_the_schema(backend: GuidanceBackend, seed: int) -> None:
    tokens = walk(backend, SCHEMA, seed)
    if tokens[-1] in EOS:
        answer = json.loads(load_vocabulary(find_model(None), VOCAB, EOS).decode_str(tokens[:-1]))
        assert isinstance(answer["n"], int) and answer["s"] in ("x", "yy")


def test_mask_is_a_function_of_the_tokens_alone(backend: GuidanceBackend) -> None:
    tokens = walk(backend, SCHEMA, 5)[:12]
    step_by_step, _ = backend.compile_grammar(SCHEMA)
    for place, token in enumerate(tokens):
        replayed, _ = backend.compile_grammar(SCHEMA)
        replayed.accept_tokens(tokens[:place])
        assert allowed(replayed) == allowed(step_by_step)
        step_by_step.accept_tokens([token])


def test_complete_answer_has_only_its_end_left_for_good(backend: GuidanceBackend) -> None:
    grammar, _ = backend.compile_grammar('start: "a"')
    grammar.accept_tokens([int(allowed(grammar)[0])])
    assert grammar.compute_mask().kind is MaskKind.END and allowed(grammar) == sorted(EOS)
    grammar.accept_tokens([EOS[0], EOS[1]])  # of a request that ignores eos tokens
    assert grammar.compute_mask().kind is MaskKind.END


def test_token_that_is_not_allowed_is_an_error(backend: GuidanceBackend) -> None:
    grammar, _ = backend.compile_grammar('start: "a" "b"')
    outside = next(token for token in range(5, VOCAB) if token not in allowed(grammar))
    with pytest.raises(GrammarError):
        grammar.accept_tokens([outside])


@pytest.mark.parametrize("text", ["start: nonsense", "{", "", '{"grammars": []}', "start: /[/"])
def test_text_that_is_no_grammar_is_an_error_with_its_cause(backend: GuidanceBackend, text: str) -> None:
    with pytest.raises(GrammarError, match=r"\w"):
        backend.compile_grammar(text)


def test_lexer_of_a_sequence_keeps_a_bounded_number_of_states(backend: GuidanceBackend) -> None:
    assert "too many states" in outcome(backend, MANY_STATES, 0, 40)[1]


RULES = [f"r{number}" for number in range(300)]
AMBIGUOUS = "\n".join(["start: " + " | ".join(RULES), *(f"{rule}: start {rule} start" for rule in RULES)])


@pytest.mark.parametrize("text", ["start: /(a?){500}(a{0,500}b?){500}/", AMBIGUOUS], ids=["expression", "ambiguous"])
def test_hostile_grammar_fails_or_goes_on_within_bounded_steps(backend: GuidanceBackend, text: str) -> None:
    """Bounds are llguidance's own, in steps and not in seconds: here they only must end."""
    try:
        grammar, _ = backend.compile_grammar(text)
        for _ in range(20):
            grammar.accept_tokens(allowed(grammar)[:1])
    except GrammarError as error:
        assert str(error) and len(str(error)) <= 500


# A few tokens of an answer in this grammar take thousands of states of the lexer.
MANY_STATES = "\n".join(
    [
        "start: " + " | ".join(f"t{number}" for number in range(20)),
        *(f"t{number}: /[a-z ]*{'abcdefghij'[number % 10]}[a-z ]{{{number + 1}}}x/" for number in range(20)),
    ]
)


def outcome(backend: GuidanceBackend, text: str, seed: int, length: int) -> tuple[list[list[int]], str]:
    """The masks of an answer of tokens that were chosen at random, and the error that ended it."""
    rng = np.random.default_rng(seed)
    grammar, _ = backend.compile_grammar(text)
    masks: list[list[int]] = []
    try:
        for _ in range(length):
            masks.append(allowed(grammar))
            grammar.accept_tokens([int(rng.choice(masks[-1]))])
    except GrammarError as error:
        return masks, str(error)
    return masks, ""


def test_result_of_a_sequence_depends_on_no_other_sequence_of_its_text() -> None:
    """Also where one before it exceeded the limits, and where many before it came near them together."""
    tokenizer = load_vocabulary(find_model(None), VOCAB, EOS)
    limits = LLParserLimits(step_lexer_fuel=200_000, max_lexer_states=5000, verbose_errors=False)
    alone = [outcome(GuidanceBackend(tokenizer, VOCAB, EOS, limits), MANY_STATES, seed, 2) for seed in range(3)]
    assert all(not error for _, error in alone)
    together = GuidanceBackend(tokenizer, VOCAB, EOS, limits)
    assert outcome(together, MANY_STATES, 0, 40)[1]
    for seed in range(39):
        assert outcome(together, MANY_STATES, seed % 3, 2) == alone[seed % 3]


def test_mask_is_as_wide_as_the_models_vocabulary() -> None:
    """Token ids that only pad the model's matrix are never allowed, and ids past it are cut off."""
    tokenizer = load_vocabulary(find_model(None), 4096 + 70, EOS)
    for text in ("start: /(.|\\n)*/", "start: <[^0]>+", "start: <[7]> | <[4100]>"):
        padded, _ = GuidanceBackend(tokenizer, 4096 + 70, EOS).compile_grammar(text)
        assert 0 < max(allowed(padded, 4096 + 70)) < 4096
    nothing, _ = GuidanceBackend(tokenizer, 4096 + 70, EOS).compile_grammar("start: <[4100]>")
    with pytest.raises(GrammarError, match="no token"):
        nothing.compute_mask()
    cut, _ = GuidanceBackend(load_vocabulary(find_model(None), VOCAB, EOS), 1001, EOS).compile_grammar(
        "start: /(.|\\n)*/"
    )
    assert len(cut.compute_mask().bits) == 128 and max(allowed(cut, 1001)) <= 1000
    assert int.from_bytes(cut.compute_mask().bits, "little").bit_count() == len(allowed(cut, 1001))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_gguf_file_has_the_masks_of_the_same_tokenizer_json(kind: str, tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "folder", kind)
    made = getattr(folders, kind)()
    model = "gpt2" if kind == "byte_level" else "llama"
    file = TextFile(made, model=model).write(tmp_path / "model.gguf")
    size = made.get_vocab_size()
    eos = (made.token_to_id(folders.EOS),)
    ours, theirs = load_vocabulary(file, size, eos), load_vocabulary(folder, size, eos)
    assert [ours.decode_bytes([token]) for token in range(size)] == [
        theirs.decode_bytes([token]) for token in range(size)
    ]
    for text in ("start: /[ -~]*/", 'start: "the " /[a-z]+/'):
        masks = [GuidanceBackend(each, size, eos).compile_grammar(text)[0].compute_mask() for each in (ours, theirs)]
        assert (masks[0].forbidden(size) == masks[1].forbidden(size)).all()


def test_model_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="no EOS token"):
        load_vocabulary(find_model(None), VOCAB, ())


def test_tokens_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_vocabulary(tmp_path, VOCAB, EOS)


def test_letters_are_the_vocabulary_of_the_fakes() -> None:
    grammar, _ = letter_backend(60, (1, 2)).compile_grammar('start: "03" | "A"')
    assert allowed(grammar, 60) == [0, 17]
