"""The facade over the five real processes: what the SMG gateway calls answers as it expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as cb
from smg_grpc_proto.generated import vllm_engine_pb2 as vb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from tests.pipeline.mutual_tls import dial_public

PROMPT = list(range(5, 45))
LIMIT_S = 120.0
# Tokens: nearly the whole context, so that it still runs when the abort comes.
LONG = 8000


@pytest.fixture(scope="module")
def stub(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("smg-state")))
        stack = LocalStack(
            StackSpec("smg", str(demo_model), drain_timeout_s=5.0, flags={"router": {"vllm-grpc": True}})
        )
    with dial_public(stack) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
    stack.close()


def generate(stub: Any, *, stream: bool, request_id: str = "", **params: Any) -> Any:
    sampling = vb.SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})
    request = vb.GenerateRequest(
        request_id=request_id,
        tokenized=vb.TokenizedInput(input_ids=PROMPT),
        sampling_params=sampling,
        stream=stream,
    )
    return stub.Generate(request, timeout=LIMIT_S)


def test_streaming_and_whole_answers_agree(stub: Any) -> None:
    (whole,) = (answer.complete for answer in generate(stub, stream=False, prompt_logprobs=1, logprobs=1))
    answers = list(generate(stub, stream=True))
    streamed = [token for answer in answers if answer.HasField("chunk") for token in answer.chunk.token_ids]
    assert list(whole.output_ids) == streamed == list(answers[-1].complete.output_ids) and len(streamed) == 12
    assert whole.finish_reason == answers[-1].complete.finish_reason == "length"
    assert not whole.input_logprobs.token_logprobs[0].HasField("value")
    assert len(whole.input_logprobs.token_logprobs) == len(PROMPT)
    assert all(entry.value <= 0 for entry in whole.input_logprobs.token_logprobs[1:])
    assert list(whole.output_logprobs.token_ids) == streamed


def test_smg_abort_ends_the_request(stub: Any) -> None:
    call = generate(stub, stream=True, request_id="long", max_tokens=LONG)
    next(iter(call))
    stub.Abort(vb.AbortRequest(request_ids=["long"]), timeout=LIMIT_S)
    answers = list(call)
    assert answers[-1].complete.finish_reason == "abort"
    assert 0 < answers[-1].complete.completion_tokens < LONG


def test_smg_reports_model_server_and_load(stub: Any) -> None:
    model = stub.GetModelInfo(vb.GetModelInfoRequest(), timeout=LIMIT_S)
    assert model.vocab_size > 0 and model.max_context_length > 0 and list(model.architectures) == ["LlamaForCausalLM"]
    server = stub.GetServerInfo(vb.GetServerInfoRequest(), timeout=LIMIT_S)
    assert server.block_size == 16 and server.kv_cache_dtype and server.max_num_seqs > 0
    (load,) = stub.GetLoads(vb.GetLoadsRequest(), timeout=LIMIT_S).loads
    assert load.max_total_num_tokens > 0 and load.max_running_requests == server.max_num_seqs


def test_kv_events_name_the_prompts_pages(stub: Any) -> None:
    list(generate(stub, stream=False))
    call = stub.SubscribeKvEvents(cb.SubscribeKvEventsRequest(), timeout=LIMIT_S)
    tokens = []
    for batch in call:
        for event in batch.events:
            tokens += [list(block.token_ids) for block in event.stored.blocks]
        if [*PROMPT[:16]] in tokens and [*PROMPT[16:32]] in tokens:
            break
    call.cancel()
    assert batch.load.max_running_requests > 0
