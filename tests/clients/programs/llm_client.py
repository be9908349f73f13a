"""The llm command and library, with an OpenAI-compatible model in its configuration."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from common import KEY, MODEL, URL, fails, run

folder = Path(tempfile.mkdtemp(prefix="llm-"))
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: quire\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: quire\n"
    f"- model_id: absent\n  model_name: nope\n  api_base: {URL}/v1\n  api_key_name: quire\n"
)

import llm  # noqa: E402 - it reads its configuration's place when it is imported


def prompt_and_stream_agree() -> None:
    model = llm.get_model("quire")
    model.key = KEY
    whole = model.prompt("Speak of love.", stream=False, max_tokens=12, temperature=0).text()
    assert whole and whole == "".join(model.prompt("Speak of love.", stream=True, max_tokens=12, temperature=0))


def a_conversation() -> None:
    model = llm.get_model("quire")
    model.key = KEY
    conversation = model.conversation()
    assert conversation.prompt("Speak.", max_tokens=6).text() and conversation.prompt("More.", max_tokens=6).text()
    assert len(conversation.responses) == 2


def errors() -> None:
    model = llm.get_model("absent")
    model.key = KEY
    fails(Exception, lambda: model.prompt("a", stream=False).text(), "nope")


if __name__ == "__main__":
    run(prompt_and_stream_agree, a_conversation, errors)
