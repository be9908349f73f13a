"""LLM: offline inference with vLLM's interface. It starts a local stack (five processes, or more with several replicas
or tokenizers), or uses a Quire at an address.

A batch of prompts is served concurrently. A private thread runs an event loop with one AsyncClient, so LLM works in
scripts, threads and notebooks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from quire.async_client import AsyncClient
from quire.beam_search import BeamSearchOutput, search
from quire.channel import metadata
from quire.engine_options import stack_flags
from quire.errors import InvalidArgument, Overloaded, QuireError, Unavailable
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from quire.outputs import ModelCard, RequestOutput
from quire.progress_bar import Bar, TerminalBar, make_bar
from quire.prompts import ChatPrompt, Prompt, is_batch
from quire.sampling_params import BeamSearchParams, SamplingParams

T = TypeVar("T")
# More requests than this are not in flight at once; the rest wait here, where waiting costs the least.
_CONCURRENCY = 256
_LEAST_RETRY_S = 0.1
_DRAIN_S = 5.0
_numbers = count()


class LLM:
    """`LLM(model)` checks the names of the options, downloads the model if needed, starts a stack, and returns when the
    stack is ready. It raises StartFailed if the start fails. The stack ends with `close`, with a `with` block, when
    this object is collected, or with the process.

    `LLM(address=...)` uses a stack that runs already, and raises InvalidArgument if a model or options are given too.
    `options` are those of `quire serve`, spelled in Python (`max_num_seqs=64`).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        api_key: str | None = None,
        replicas: int = 1,
        tokenizers: int = 1,
        **options: Any,
    ) -> None:
        self._stack: LocalStack | None = None
        self._defaults: SamplingParams | None = None
        metadata(api_key)  # a key that cannot be sent is refused before a stack starts
        if address is None:
            # Refused, where it cannot be, before a model is fetched.
            spec = StackSpec(
                name=f"llm-{os.getpid()}-{next(_numbers)}",
                model="",
                keep_directory=False,
                replicas=replicas,
                tokenizers=tokenizers,
                flags=stack_flags(options),
                drain_timeout_s=_DRAIN_S,
            )
            path = find_model(model, options.get("revision") or "", options.get("download_dir") or "")
            self._stack = LocalStack(replace(spec, model=str(path)))
            address = self._stack.grpc
        elif model is not None or options or (replicas, tokenizers) != (1, 1):
            raise InvalidArgument(
                "MODEL_AND_ADDRESS",
                "A Quire at an address has its model and options already.",
                "Give either model and options, or address.",
            )
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        self._thread.start()
        self._client = self._run(_make_client(address, api_key))
        # Bound to the parts, not to self, so that it can run when self is collected, and at the process's exit.
        self._finalizer = weakref.finalize(self, _close, self._loop, self._thread, self._client, self._stack)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return continuations of every prompt, in the order of the prompts, at most 256 in flight at a time.
        `sampling_params` and `priority` are one for all prompts, or one for each; another number raises
        InvalidArgument. Without `sampling_params`, the model's own defaults apply. A prompt that is refused as
        Overloaded (a full queue, or a rate limit) is sent again without limit; the first other failure cancels all
        other requests of the call, and is raised (an Unavailable may be replaced by the error of a service that died;
        other errors than QuireErrors come in an ExceptionGroup). `use_tqdm` is as in `make_bar`."""
        batch: list[Prompt] = list(prompts) if is_batch(prompts) else [prompts]  # type: ignore[list-item,arg-type]  # is_batch tells them apart
        default = self.get_default_sampling_params() if sampling_params is None else SamplingParams()
        params = _one_per_prompt(sampling_params, SamplingParams, default, len(batch), "sampling_params")
        priorities = _one_per_prompt(priority, int, 0, len(batch), "priority")
        return self._run(self._serve(batch, params, priorities, make_bar(use_tqdm, len(batch))))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return answers to one conversation, or to each of several, in order. The model's chat template renders them,
        or `chat_template` if the tokenizers allow it. `tools` are in OpenAI's form. `continue_final_message`: the
        answer continues the last message. Sampling, the bar of `use_tqdm` and failures are as in `generate`."""
        single = all(isinstance(message, Mapping) for message in messages)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            ChatPrompt(
                conversation,
                tuple(tools or ()),
                dict(chat_template_kwargs or {}),
                add_generation_prompt,
                continue_final_message,
                chat_template or "",
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of every prompt that a beam search finds, in order. `concurrency_limit`
        prompts are searched at a time (None or 0: 256). The search asks for 2 x beam_width logprobs; the router allows
        at most 20, unless `--max-logprobs` changes that. Failures are as in `generate`."""
        batch: list[Prompt] = list(prompts) if is_batch(prompts) else [prompts]  # type: ignore[list-item,arg-type]  # is_batch tells them apart
        limit = concurrency_limit or _CONCURRENCY
        return self._run(self._search(batch, params, limit, make_bar(use_tqdm, len(batch))))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls that set none. They are the model's own, from its
        generation_config.json, --generation-config and --override-generation-config. The first call asks the router.
        Failures are as in `generate`."""
        if self._defaults is None:
            card = self._run(self._first_model())
            self._defaults = SamplingParams(**card.sampling_defaults)  # type: ignore[arg-type]  # numbers by name
        return self._defaults

    def close(self) -> None:
        """Close the connection, and end the stack that this object started, if any. Requests after this raise
        RuntimeError. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the private event loop, wait for it, and return its result. An exception in this thread,
        such as Ctrl-C, cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the requests too
            raise

    async def _serve(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        bar: Bar | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, at most 256 at a time, and return the outputs in the order of the prompts. The three
        sequences have one entry per prompt. A prompt that is refused as Overloaded is sent again without limit; the
        first other failure cancels the rest, and is raised as by `_gather`. Each completed prompt advances the bar,
        which is closed in any case."""
        gate = asyncio.Semaphore(_CONCURRENCY)

        async def one(prompt: Prompt, param: SamplingParams, priority: int) -> RequestOutput:
            """Complete one prompt when there is room, count it in the bar, and return its output."""
            async with gate:
                output = await self._complete_with_retries(prompt, param, priority)
            if bar is not None:
                if isinstance(bar, TerminalBar):
                    bar.count(output)
                bar.update(1)
            return output

        try:
            return await self._gather([one(*item) for item in zip(prompts, params, priorities, strict=True)])
        finally:
            if bar is not None:
                bar.close()

    async def _search(
        self, prompts: Sequence[Prompt], params: BeamSearchParams, limit: int, bar: Bar | None
    ) -> list[BeamSearchOutput]:
        """Run a beam search for every prompt, `limit` of them at a time, and return the results in order. Each
        completed prompt advances the bar, which is closed in any case."""
        gate = asyncio.Semaphore(limit)

        async def ask(beams: Sequence[Prompt], step: SamplingParams) -> list[RequestOutput]:
            return await self._serve(beams, [step] * len(beams), [0] * len(beams))

        async def one(prompt: Prompt, eos: frozenset[int]) -> BeamSearchOutput:
            """Search one prompt when there is room, count it in the bar, and return the result."""
            async with gate:
                found = await search(prompt, params, eos, ask)
            if bar is not None:
                bar.update(1)
            return found

        try:
            eos = frozenset((await self._first_model()).eos_token_ids)
            return await self._gather([one(prompt, eos) for prompt in prompts])
        finally:
            if bar is not None:
                bar.close()

    async def _first_model(self) -> ModelCard:
        """Return the card of the first model that the router lists. Raises Unavailable if it lists none, and the errors
        of `_gather`."""

        async def ask() -> ModelCard:
            """Ask for the models, and return the first."""
            return first_card(await self._client.models())

        (card,) = await self._gather([ask()])
        return card

    async def _gather(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run the coroutines at once, and return their results in order. The first failure cancels the others. Raises
        the first QuireError among the failures; an Unavailable may be replaced by the cause that
        `_explain_by_dead_service` finds. If no failure is a QuireError, raises the ExceptionGroup of all failures."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in works]
        except BaseExceptionGroup as failures:
            own = [failure for failure in failures.exceptions if isinstance(failure, QuireError)]
            if not own:
                raise
            raise self._explain_by_dead_service(own[0]) from None
        return [task.result() for task in tasks]

    async def _complete_with_retries(self, prompt: Prompt, params: SamplingParams, priority: int) -> RequestOutput:
        """Complete one prompt, and return its output. While the router is Overloaded, wait as long as it says, at least
        0.1 s, and send the prompt again, without limit."""
        while True:
            try:
                return await self._client.complete(prompt, params, priority=priority)
            except Overloaded as error:
                await asyncio.sleep(max(error.retry_after_s, _LEAST_RETRY_S))

    def _explain_by_dead_service(self, error: QuireError) -> QuireError:
        """Return the error to raise. If `error` is Unavailable and a service of this object's own stack has died at any
        time (even if it runs again), the result names the last service that died, with cause, fix and log. Otherwise
        the result is `error` itself."""
        if isinstance(error, Unavailable) and self._stack is not None and self._stack.deaths:
            death = self._stack.deaths[-1]
            return Unavailable(
                death.code, f"The {death.service} died: {death.message}", f"{death.fix} Log: {death.log}"
            )
        return error


def first_card(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the first of the models that a router lists. Raises Unavailable if there is none."""
    if not cards:
        raise Unavailable(
            "NO_HEALTHY_REPLICA",
            "The router lists no model.",
            "Wait until an engine is ready, or use an API key that may use a model.",
        )
    return cards[0]


async def _make_client(address: str, api_key: str | None) -> AsyncClient:
    """Make the client in the event loop to which it will belong."""
    return AsyncClient(address, api_key=api_key)


def _one_per_prompt(value: Any, kind: type[T], default: T, length: int, param: str) -> list[T]:
    """Return `length` values of the type `kind`: `default` for each if `value` is None, the same for each if it is a
    single `kind`, else the items of the list. Raises InvalidArgument, naming `param`, if a list has another length."""
    if value is None:
        return [default] * length
    if isinstance(value, kind):
        return [value] * length
    if len(value) != length:
        raise InvalidArgument(
            "LENGTHS_DIFFER", f"{len(value)} {param} for {length} prompts.", "Give one, or one each.", param=param
        )
    return list(value)


def _close(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient, stack: LocalStack | None
) -> None:
    """Close the client, end the event loop and its thread, then the stack if there is one."""
    asyncio.run_coroutine_threadsafe(client.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    if stack is not None:
        stack.close()
