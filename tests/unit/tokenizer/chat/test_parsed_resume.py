"""An answer that is parsed can be taken up by another tokenizer after any token, with any characters sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire_tokenizer.detokenize.detokenizer import Detokenizer, OpenRequest, StepText, StreamLimits, TokenRows
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.output_parsing.answer_parsers import ParseOptions
from quire_tokenizer.vocabulary import Vocabulary
from tests.unit.tokenizer import folders

LIMITS = StreamLimits(8, 8, 80, 8, 10_000)
WRITTEN = (
    "<think>\nWo? 😀\n</think>\n\nIch sehe nach.\n"
    '<tool_call>\n{"name": "find", "arguments": {"city": "Nîmes"}}\n</tool_call>\nSo END of it'
)
OPTIONS = ParseOptions([{"type": "function", "function": {"name": "find"}}], calls=True, reasoning=True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder: Path = folders.write_folder(tmp_path_factory.mktemp("model") / "tiny")
    return Vocabulary(read_model_folder(str(folder)), tool_parser="hermes")


class Answer:
    """The text that a client has, and the kind and call of each character."""

    def __init__(self, vocabulary: Vocabulary, request: OpenRequest) -> None:
        self.detokenizer = Detokenizer(vocabulary, LIMITS, lambda ended: None)
        for _ in self.detokenizer.open(request):
            pass
        self.text = ""
        self.kinds: list[tuple[int, int]] = []
        self.reasoning_tokens = 0

    def step(self, ids: list[int], finish: int = 0) -> None:
        answer = StepText()
        handle, count, token = (np.array(column, np.int32) for column in ([1], [len(ids)], ids))
        rows = TokenRows(handle, count, token, np.array([finish], np.uint8))
        self.detokenizer.step(rows, answer)
        self.text += "".join(answer.text)
        for owner, part in answer.parts:
            assert owner == 1
            self.kinds += [(part.kind, part.call)] * part.chars
        self.reasoning_tokens = dict(answer.reasoning_tokens).get(1, self.reasoning_tokens)


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_text_and_parts_are_the_same_after_a_resumption_anywhere(vocabulary: Vocabulary, stop: tuple[str, ...]) -> None:
    ids = vocabulary.tokenizer.encode(WRITTEN, add_special_tokens=False).ids
    whole = Answer(vocabulary, OpenRequest(1, stop=stop, parsing=OPTIONS))
    shown = []
    for token in ids:
        whole.step([token])
        shown.append(len(whole.text))
    whole.step([], 1)
    assert len(whole.kinds) == len(whole.text) and whole.reasoning_tokens
    assert "<" not in whole.text and whole.text.startswith("Wo? 😀")
    for cut in range(len(ids)):
        for sent in {0, shown[cut], shown[cut] // 2, max(0, shown[cut] - 1)}:
            prior = np.array(ids[: cut + 1], np.int32)
            later = Answer(vocabulary, OpenRequest(1, stop=stop, parsing=OPTIONS, prior_ids=prior, chars_sent=sent))
            later.step(ids[cut + 1 :])
            later.step([], 1)
            assert later.text == whole.text[sent:], (cut, sent)
            assert later.kinds == whole.kinds[sent:], (cut, sent)
