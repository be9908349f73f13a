"""A scheduler whose model repeats the prompt: output token i is prompt token i modulo its length.

One message per step with all running requests, as the contract has it. Logprobs are -(1 + i) for the i-th token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from quire.v1 import common_pb2, scheduler_pb2_grpc
from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import i32, pack_f32, pack_i32

EOS = 256
STOP, LENGTH = 1, 2


@dataclass
class _Run:
    submit: pb.Submit
    prompt: list[int]
    sent: int = 0


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """`gate` holds back steps while cleared. `refuse` is an error for the next submits. `aborts` are handles."""

    def __init__(
        self,
        *,
        model: str = "fake",
        max_model_len: int = 4096,
        step_s: float = 0.001,
        tokens_per_step: int = 1,
        phase: str = "ready",
        cached_tokens: int = 0,
        max_num_seqs: int = 64,
    ) -> None:
        self.model, self.max_model_len, self.max_num_seqs = model, max_model_len, max_num_seqs
        self.step_s, self.tokens_per_step, self.cached_tokens = step_s, tokens_per_step, cached_tokens
        self.gate = asyncio.Event()
        self.gate.set()
        self.submits: list[pb.Submit] = []
        self.aborts: list[int] = []
        self.aborted = asyncio.Event()
        self.running: dict[int, _Run] = {}
        self.refuse: common_pb2.RequestError | None = None
        self.extra_load = 0
        self._phase, self.progress, self.detail = phase, 0.0, ""
        self._phase_changed = asyncio.Event()

    def add(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    def set_phase(self, phase: str, progress: float = 1.0, detail: str = "") -> None:
        self._phase, self.progress, self.detail = phase, progress, detail
        self.report()

    def report(self) -> None:
        """Make WatchLoad speak now."""
        self._phase_changed.set()
        self._phase_changed = asyncio.Event()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=common_pb2.ModelInfo(
                name=self.model,
                architecture="FakeForCausalLM",
                max_model_len=self.max_model_len,
                vocab_size=300,
                eos_token_ids=pack_i32([EOS]),
            ),
            instance="fake",
            role="both",
        )

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> AsyncIterator[pb.Load]:
        while True:
            changed = self._phase_changed
            yield pb.Load(
                phase=self._phase,
                progress=self.progress,
                detail=self.detail,
                running=len(self.running) + self.extra_load,
                max_num_seqs=self.max_num_seqs,
            )
            await changed.wait()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        failed: list[pb.Failed] = []
        mine: dict[int, _Run] = {}
        woken = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, mine, failed, woken))
        try:
            yield pb.SessionResponse(welcome=pb.SessionWelcome(protocol_version=1))
            while True:
                if failed:
                    yield pb.SessionResponse(failed=failed)
                    failed.clear()
                if mine and self.gate.is_set():
                    yield self._step(mine)
                    await asyncio.sleep(self.step_s)
                    continue
                waits = [asyncio.ensure_future(woken.wait())]
                waits += [asyncio.ensure_future(self.gate.wait())] if mine else []
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                woken.clear()
        finally:
            reader.cancel()
            for handle in mine:
                self.running.pop(handle, None)

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        mine: dict[int, _Run],
        failed: list[pb.Failed],
        woken: asyncio.Event,
    ) -> None:
        async for request in requests:
            for submit in request.submit:
                self.submits.append(submit)
                if self.refuse is not None:
                    failed.append(pb.Failed(handle=submit.handle, error=self.refuse))
                    continue
                prompt = i32(submit.sequence.inputs[0].token_ids).tolist()
                mine[submit.handle] = self.running[submit.handle] = _Run(submit, prompt)
            for handle in i32(request.abort).tolist():
                self.aborts.append(handle)
                mine.pop(handle, None)
                self.running.pop(handle, None)
            if request.abort:
                self.aborted.set()
            woken.set()

    def _step(self, mine: dict[int, _Run]) -> pb.SessionResponse:
        handles: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        finishes = bytearray()
        columns: dict[str, list[Any]] = {"index": [], "logprob": [], "count": [], "id": [], "top": []}
        message = pb.SessionResponse()
        for handle, run in list(mine.items()):
            spec = run.submit.sequence
            if run.sent == 0:
                message.admitted.add(
                    handle=handle, attempt=run.submit.context.attempt, cached_tokens=self.cached_tokens
                )
            stops = {*i32(spec.stop.stop_token_ids).tolist(), *(() if spec.stop.ignore_eos else (EOS,))}
            taken, finish = 0, 0
            while taken < self.tokens_per_step and not finish:
                token = run.prompt[run.sent % len(run.prompt)]
                if spec.sampling.HasField("logprobs"):
                    self._add_logprobs(columns, len(tokens), token, run.sent, spec.sampling.logprobs)
                tokens.append(token)
                run.sent, taken = run.sent + 1, taken + 1
                if token in stops:
                    finish = STOP
                elif run.sent >= spec.stop.max_tokens:
                    finish = LENGTH
            handles.append(handle)
            counts.append(taken)
            finishes.append(finish)
            if finish:
                done = message.finished.add(handle=handle)
                done.usage.prompt_tokens, done.usage.completion_tokens = len(run.prompt), run.sent
                done.timings.add(service="scheduler", phase="queue", us=5, count=1)
                done.timings.add(service="worker", phase="decode", us=7 * run.sent, count=run.sent)
                if finish == STOP:
                    done.stop_token_id = tokens[-1]
                del mine[handle]
                self.running.pop(handle, None)
        message.handle, message.count, message.token = pack_i32(handles), pack_i32(counts), pack_i32(tokens)
        message.finish = bytes(finishes)
        if columns["index"]:
            message.logprobs.token_index = pack_i32(columns["index"])
            message.logprobs.logprob = pack_f32(columns["logprob"])
            message.logprobs.rank = pack_i32([1] * len(columns["index"]))
            message.logprobs.top_count = pack_i32(columns["count"])
            message.logprobs.top_id = pack_i32(columns["id"])
            message.logprobs.top_logprob = pack_f32(columns["top"])
        return message

    @staticmethod
    def _add_logprobs(columns: dict[str, list[Any]], index: int, token: int, sent: int, alternatives: int) -> None:
        """The chosen token is its own best alternative, then come the next ids."""
        columns["index"].append(index)
        columns["logprob"].append(-1.0 - sent)
        columns["count"].append(alternatives)
        columns["id"] += [(token + i) % 256 for i in range(alternatives)]
        columns["top"] += [-1.0 - sent - i for i in range(alternatives)]


async def _main() -> None:
    from tests.fakes.grpc_host import GrpcHost

    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=5.0)
    step_s = parser.parse_args().step_ms / 1000
    async with GrpcHost(FakeScheduler(step_s=step_s, max_model_len=100_000, max_num_seqs=256).add) as host:
        print(host.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    try:
        uvloop.run(_main())
    except KeyboardInterrupt:
        os._exit(0)
