"""A scheduler whose model repeats the prompt: output token i is prompt token i modulo its length.

One message per step with all running requests, as the contract has it. Logprobs are -(1 + i) for the i-th token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.v1 import common_pb2, scheduler_pb2_grpc
from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import i32, pack_f32, pack_i32
from quire_common.errors import Unavailable
from tests.fakes.grpc_host import run_host
from tests.fakes.router.fake_pages import NAMESPACE, FakePages

EOS = 256
PAGE_SIZE = 16
STOP, LENGTH = 1, 2


@dataclass
class Run:
    submit: pb.Submit
    prompt: list[int]
    sent: int
    admitted: bool = False


@dataclass
class Life:
    """One session stream."""

    runs: dict[int, Run] = field(default_factory=dict)
    failed: list[pb.Failed] = field(default_factory=list)
    admitted: list[pb.Admitted] = field(default_factory=list)
    said: list[pb.SessionResponse] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    broken: Exception | None = None
    dying: bool = False


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """`gate` holds back steps while cleared. `refuse` is an error for the next submits. `aborts` are handles.

    A submit with output ids goes on behind them. `old_handles`: what a zombie speaks nonsense of in its next session.
    """

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
        digest: bytes = b"d",
        heartbeat_ms: int = 0,
        finish: int = LENGTH,
        role: str = "both",
        capabilities: Sequence[str] = (),
        sampling_defaults: Mapping[str, float] | None = None,
        vocab_size: int = 300,
    ) -> None:
        self.capabilities = capabilities
        defaults: Any = sampling_defaults or {}
        self.sampling_defaults = common_pb2.SamplingDefaults(**defaults)
        self.finish, self.role, self.vocab_size = finish, role, vocab_size
        self.model, self.max_model_len, self.max_num_seqs = model, max_model_len, max_num_seqs
        self.scores_prompts = True
        self.step_s, self.tokens_per_step, self.cached_tokens = step_s, tokens_per_step, cached_tokens
        self.digest, self.heartbeat_ms = digest, heartbeat_ms
        self.pages = FakePages()
        # Added to every logprob of a request.
        self.bias: Callable[[pb.Submit], float] = lambda submit: 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.awake = asyncio.Event()
        self.awake.set()
        self.reading = asyncio.Event()
        self.reading.set()
        self.sessions = 0
        self.submitted = asyncio.Event()
        self.breaks: list[int] = []
        self.break_with: Exception = Unavailable("GONE", "This session is over.", "Open another.")
        self.old_handles: list[int] = []
        self._lives: list[Life] = []
        self.submits: list[pb.Submit] = []
        self.aborts: list[int] = []
        self.aborted = asyncio.Event()
        self.running: dict[int, Run] = {}
        self.refuse: common_pb2.RequestError | None = None
        self.extra_load = 0
        # Calls of Drain and SetRole; they are answered once `obedient` is set.
        self.drains: list[pb.DrainRequest] = []
        self.roles: list[pb.SetRoleRequest] = []
        self.obedient = asyncio.Event()
        self.obedient.set()
        # Further fields of Load.
        self.rates: dict[str, Any] = {}
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
                vocab_size=self.vocab_size,
                eos_token_ids=pack_i32([EOS]),
                digest=self.digest,
                pages=common_pb2.PageGeometry(
                    page_size=PAGE_SIZE, groups=[common_pb2.KvGroup(page_bytes=1)], namespace=NAMESPACE
                ),
                capabilities=self.capabilities,
                sampling_defaults=self.sampling_defaults,
            ),
            instance="fake",
            role=self.role,
        )

    async def WatchPages(
        self, request: common_pb2.WatchPagesRequest, context: Any
    ) -> AsyncIterator[common_pb2.PageEvents]:
        async for frame in self.pages.watch(request):
            yield frame

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> AsyncIterator[pb.Load]:
        while True:
            changed = self._phase_changed
            yield pb.Load(
                phase=self._phase,
                progress=self.progress,
                detail=self.detail,
                running=len(self.running) + self.extra_load,
                max_num_seqs=self.max_num_seqs,
                role=self.role,
                **self.rates,
            )
            await changed.wait()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.drains.append(request)
        self.set_phase("draining")
        await self.obedient.wait()
        return pb.DrainResponse()

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        self.roles.append(request)
        await self.obedient.wait()
        former, self.role = self.role, request.role
        self.report()
        return pb.SetRoleResponse(former_role=former)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        life = Life()
        reader = asyncio.create_task(self._read(request_iterator, life))
        self.sessions += 1
        self._lives.append(life)
        try:
            yield pb.SessionResponse(welcome=pb.SessionWelcome(protocol_version=1, heartbeat_ms=self.heartbeat_ms))
            if self.old_handles:
                yield _nonsense(self.old_handles)
            while True:
                message = await self._next(life)
                if not self.awake.is_set():
                    await self.awake.wait()
                if life.broken is not None:
                    raise life.broken
                yield message
                if life.dying:
                    raise self.break_with
                if message.handle:
                    await asyncio.sleep(self.step_s)
        finally:
            self._lives.remove(life)
            reader.cancel()
            self.session_over(life)

    async def _next(self, life: Life) -> pb.SessionResponse:
        while True:
            if life.broken is not None or not self.awake.is_set():
                return pb.SessionResponse()
            if life.failed:
                failed, life.failed = life.failed, []
                return pb.SessionResponse(failed=failed)
            if life.said:
                return life.said.pop(0)
            if life.admitted:
                admitted, life.admitted = life.admitted, []
                return pb.SessionResponse(admitted=admitted)
            if life.runs and self.gate.is_set():
                message = self._step(life.runs)
                self.stepped(message, life)
                self._count(message, life)
                return message
            waits = [asyncio.ensure_future(life.woken.wait())]
            waits += [asyncio.ensure_future(self.gate.wait())] if life.runs else []
            timeouts = self.heartbeat_ms / 2000 if self.heartbeat_ms else None
            done, _ = await asyncio.wait(waits, timeout=timeouts, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            life.woken.clear()
            if not done:
                return pb.SessionResponse()  # a sign of life

    def _count(self, message: pb.SessionResponse, life: Life) -> None:
        """The session breaks when the first of `breaks` has been said in tokens; the others are of later sessions."""
        if self.breaks:
            self.breaks[0] -= len(message.token) // 4
            if self.breaks[0] <= 0:
                self.breaks.pop(0)
                life.dying = True

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], life: Life) -> None:
        async for request in requests:
            await self.reading.wait()
            for submit in request.submit:
                self.submits.append(submit)
                self.submitted.set()
                if self.refuse is not None:
                    life.failed.append(pb.Failed(handle=submit.handle, error=self.refuse))
                    continue
                self.begin(submit, life)
            self.other(request, life)
            for handle in i32(request.abort).tolist():
                self.aborts.append(handle)
                life.runs.pop(handle, None)
                self.running.pop(handle, None)
            if request.abort:
                self.aborted.set()
            life.woken.set()

    def begin(self, submit: pb.Submit, life: Life) -> None:
        """Run it from now on."""
        prompt = i32(submit.sequence.inputs[0].token_ids).tolist()
        run = Run(submit, prompt, len(submit.sequence.output_ids) // 4)
        life.runs[submit.handle] = self.running[submit.handle] = run

    def session_over(self, life: Life) -> None:
        """A session is over."""
        for handle in life.runs:
            self.running.pop(handle, None)

    def other(self, request: pb.SessionRequest, life: Life) -> None:
        """What a request has beside submits and aborts."""

    def stepped(self, message: pb.SessionResponse, life: Life) -> None:
        """A step is about to be said."""

    def break_sessions(self, error: Exception | None = None) -> None:
        """End every session, as a process that dies or does not want it any more."""
        for life in self._lives:
            life.broken = error or self.break_with
            life.woken.set()

    def fail_all(self, code: str, grpc_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, *, param: str = "") -> None:
        """Everything that runs fails with this code; the sessions go on."""
        for life in self._lives:
            for handle in list(life.runs):
                error = common_pb2.RequestError(
                    code=code, message="m", fix="f", grpc_code=grpc_code.value[0], param=param
                )
                life.failed.append(pb.Failed(handle=handle, error=error))
                del life.runs[handle]
                self.running.pop(handle, None)
            life.woken.set()

    def admit_all(self) -> None:
        """Everything that runs is said to be admitted, and has no token yet."""
        for life in self._lives:
            for handle, run in life.runs.items():
                if not run.admitted:
                    run.admitted = True
                    life.admitted.append(pb.Admitted(handle=handle, attempt=run.submit.context.attempt))
            life.woken.set()

    def hang(self) -> None:
        """Say nothing more on sessions, not even a sign of life; `awake.set()` ends that."""
        self.awake.clear()
        for life in self._lives:
            life.woken.set()

    def _step(self, mine: dict[int, Run]) -> pb.SessionResponse:
        handles: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        finishes = bytearray()
        columns: dict[str, list[Any]] = {"index": [], "logprob": [], "count": [], "id": [], "top": []}
        message = pb.SessionResponse()
        for handle, run in list(mine.items()):
            spec = run.submit.sequence
            if not run.admitted:
                run.admitted = True
                message.admitted.add(
                    handle=handle, attempt=run.submit.context.attempt, cached_tokens=self.cached_tokens
                )
                if self.scores_prompts and spec.sampling.HasField("prompt_logprobs"):
                    scores = _prompt_logprobs(handle, len(run.prompt), spec.sampling.prompt_logprobs)
                    message.prompt_logprobs.CopyFrom(scores)
            stops = {*i32(spec.stop.stop_token_ids).tolist(), *(() if spec.stop.ignore_eos else (EOS,))}
            taken, finish = 0, 0
            while taken < self.tokens_per_step and not finish:
                token = run.prompt[run.sent % len(run.prompt)]
                if spec.sampling.HasField("logprobs"):
                    bias = self.bias(run.submit)
                    self._add_logprobs(columns, len(tokens), token, run.sent, spec.sampling.logprobs, bias)
                tokens.append(token)
                run.sent, taken = run.sent + 1, taken + 1
                if token in stops:
                    finish = STOP
                elif run.sent >= spec.stop.max_tokens:
                    finish = self.finish
            handles.append(handle)
            counts.append(taken)
            finishes.append(finish)
            if finish:
                done = message.finished.add(handle=handle)
                done.usage.prompt_tokens, done.usage.completion_tokens = len(run.prompt), run.sent
                done.usage.cached_tokens = self.cached_tokens
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
    def _add_logprobs(
        columns: dict[str, list[Any]], index: int, token: int, sent: int, alternatives: int, bias: float
    ) -> None:
        """The chosen token is its own best alternative, then come the next ids."""
        columns["index"].append(index)
        columns["logprob"].append(bias - 1.0 - sent)
        columns["count"].append(alternatives)
        columns["id"] += [(token + i) % 256 for i in range(alternatives)]
        columns["top"] += [bias - 1.0 - sent - i for i in range(alternatives)]


def _prompt_logprobs(handle: int, length: int, alternatives: int) -> common_pb2.PromptLogprobColumns:
    """In two runs: token i has logprob -i and rank 2; its alternatives are the ids i, i + 1 and so on."""
    places = range(1, length)
    columns = common_pb2.LogprobColumns(
        token_index=pack_i32(range(len(places))),
        logprob=pack_f32([-float(i) for i in places]),
        rank=pack_i32([2] * len(places)),
        top_count=pack_i32([alternatives] * len(places)),
        top_id=pack_i32([i + k for i in places for k in range(alternatives)]),
        top_logprob=pack_f32([-0.5 - k for _ in places for k in range(alternatives)]),
    )
    half = len(places) // 2
    return common_pb2.PromptLogprobColumns(
        owner=pack_i32([handle, handle]),
        first=pack_i32([1, 1 + half]),
        count=pack_i32([half, len(places) - half]),
        logprobs=columns,
    )


def _nonsense(handles: list[int]) -> pb.SessionResponse:
    """All that could be said of handles: rows with tokens and ends, notes, failures."""
    message = pb.SessionResponse(
        handle=pack_i32(handles), count=pack_i32([1] * len(handles)), token=pack_i32([90] * len(handles))
    )
    message.finish = bytes([LENGTH] * len(handles))
    for handle in handles:
        message.admitted.add(handle=handle, cached_tokens=999)
        message.finished.add(handle=handle).usage.cached_tokens = 999
        message.failed.add(handle=handle, error=common_pb2.RequestError(code="ZOMBIE", message="m", fix="f"))
    return message


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=5.0)
    step_s = parser.parse_args().step_ms / 1000
    run_host(FakeScheduler(step_s=step_s, max_model_len=100_000, max_num_seqs=256).add)


if __name__ == "__main__":
    _main()
