"""A real scheduler over a paced worker that goes wrong: what a request sees of it, and how soon."""

from __future__ import annotations

import time

import grpc
import numpy as np
import pytest

from bench.harness.processes import Service
from quire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from quire_common.errors import from_rpc_error
from quire_common.sequence import Sequence, Stop, sequence_to_pb
from quire_worker.paced.answer import paced_tokens
from tests.tiers import deep_after

TOKENS = 300
STOP = Stop(TOKENS, ignore_eos=True)
PROMPT = list(range(20))
# What the watchdog is set to, and what a busy machine may make of it.
TIMEOUT_S, DETECTED_S = 2, 30.0
PATIENT_S = 60


def generate(fault: str, timeout_s: int) -> tuple[list[int], str, float]:
    """Tokens that came, the code of the error after them, and how long after the last of them it came."""
    tokens, code, last = list[int](), "", time.monotonic()
    with (
        Service("worker", "--paced=2", "--max-num-seqs=8", f"--paced-fault={fault}") as worker,
        Service("scheduler", f"--worker={worker.ready()}", f"--worker-timeout-s={timeout_s}") as scheduler,
        grpc.insecure_channel(scheduler.ready()) as channel,
    ):
        request = scheduler_pb2.GenerateTokensRequest(
            context=common_pb2.RequestContext(request_id="faulty"),
            sequence=sequence_to_pb(Sequence(np.array(PROMPT, np.int32), STOP)),
        )
        try:
            for response in scheduler_pb2_grpc.SchedulerStub(channel).GenerateTokens(request, timeout=60):
                if response.token:
                    tokens += np.frombuffer(response.token, "<i4").tolist()
                    last = time.monotonic()
        except grpc.RpcError as error:
            code = from_rpc_error(error).code
        took = time.monotonic() - last
        worker.popen.kill()  # one that hangs would take its time
    return tokens, code, took


@pytest.mark.parametrize("fault", deep_after(2, ["die@50", "silent@50", "hang@50", "wrong-epoch@50"]))
def test_lost_paced_worker_is_noticed(fault: str) -> None:
    tokens, code, took = generate(fault, TIMEOUT_S)
    assert code == "WORKER_LOST" and took < DETECTED_S
    assert 0 < len(tokens) < 50 and tokens == paced_tokens(PROMPT, STOP).tokens[: len(tokens)]


@pytest.mark.deep
def test_a_slow_step_changes_no_token() -> None:
    tokens, code, _ = generate("slow@50:300", PATIENT_S)
    assert (tokens, code) == (paced_tokens(PROMPT, STOP).tokens, "")


def test_nan_ends_only_its_request() -> None:
    tokens, code, _ = generate("nan@50", PATIENT_S)
    assert code == "NAN_LOGITS" and tokens == paced_tokens(PROMPT, STOP).tokens[: len(tokens)]
