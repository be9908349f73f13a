"""One GGUF file, served by all services: its tokenizer, its template, its weights."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType

from quire.llm import LLM
from quire.sampling_params import SamplingParams
from tests.gguf.tiny import TinyModel
from tests.gguf.vocabularies import TextFile
from tests.oracle import Oracle
from tests.unit.tokenizer import folders


def test_a_gguf_file_is_served_whole(tmp_path: Path) -> None:
    tokenizer = folders.byte_level()
    model = TinyModel(
        vocab=tokenizer.get_vocab_size(),
        kind=GGMLQuantizationType.Q8_0,
        text=TextFile(tokenizer, pre="deepseek-r1-qwen"),
    )
    path = model.write(tmp_path / "tiny.gguf")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model=path) as llm:
        (plain,) = llm.generate("To be, or not to be", params)
        (chat,) = llm.chat([{"role": "user", "content": "hello"}], params)
    oracle = Oracle(path)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for output, text in ((plain, "To be, or not to be"), (chat, rendered)):
        ids = list(output.outputs[0].token_ids)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        assert output.prompt_token_ids == prompt and len(ids) == 8
        divergence = oracle.first_divergence(prompt, ids)
        assert divergence is None or divergence.is_true_tie, divergence
