"""LLM over a stack of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.local.state import list_names
from tests.pipeline.leftovers import assert_nothing_left, processes_of, read_state


def test_llm_serves_a_batch_and_leaves_nothing(demo_model: Path, state_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(demo_model, replicas=2, tokenizers=2, max_num_seqs=8) as llm:
        (name,) = list_names()
        state = read_state(name)
        outputs = llm.generate(["ROMEO:", "JULIET:", "NURSE:"] * 8, params)
        again = llm.generate("ROMEO:", params)
        chat = llm.chat([{"role": "user", "content": "Speak."}], params)
    assert [output.prompt for output in outputs[:3]] == ["ROMEO:", "JULIET:", "NURSE:"]
    assert len({output.outputs[0].text for output in outputs}) == 3
    assert again[0].outputs[0].text == outputs[0].outputs[0].text
    assert chat[0].finished
    assert_nothing_left(state)
    assert not (state_dir / name).exists()


@pytest.mark.deep
def test_a_script_that_forgets_to_close_leaves_nothing(demo_model: Path) -> None:
    program = (
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(demo_model)!r})\n"
        "print(llm.generate('ROMEO:', SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].finish_reason)\n"
        "from quire.local.state import list_names, StateDirectory\n"
        "state = StateDirectory(list_names()[0]).read()\n"
        "print(state.stack_id, state.supervisor.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    reason, identity = done.stdout.splitlines()
    stack_id, supervisor = identity.split()
    assert reason == "length"
    assert processes_of(stack_id) == []
    assert not psutil.pid_exists(int(supervisor))
    assert done.stderr == ""
