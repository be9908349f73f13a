"""Turns prompts into token ids by calls to the tokenizers. This module knows nothing of engines. The pipeline checks
the lengths, because it knows the model's limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument
from quire_common.thinking import ThinkingBudget
from quire_router.requests.lengths import PROMPT_TOO_LONG, with_context_length
from quire_router.sequences.delta import HopTiming
from quire_router.sequences.job import ChatPrompt, TextPrompt, TokenPrompt
from quire_router.sequences.structured import PROMPT_ENDS, StructuredOutput, naming_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from quire_common.sequence import RequestContext
    from quire_router.sequences.job import GenerateJob, Prompt
    from quire_router.text.tokenizer_client import TokenizerClient


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """The int32 ids of each prompt, in order, and the time that the tokenizer took."""

    ids: list[NDArray[np.int32]]
    timing: HopTiming
    prompt_end: int = 0
    """The conversation's quire.v1.PromptEnd if a prompt is a conversation; otherwise 0."""


class Encoder:
    """Encodes prompts and decodes token ids. All texts of a job are encoded by one call to a tokenizer."""

    def __init__(self, client: TokenizerClient) -> None:
        self._client = client

    async def encode(self, job: GenerateJob, context: RequestContext, max_tokens: int) -> EncodedPrompts:
        """Tokenize all prompts of a job: texts by one call, each chat by a call that renders it; prompts of token ids
        stay as they are. The timing is the sum over all calls, and the prompt's end is that of the last chat. Raises
        the tokenizer's QuireError. One is PROMPT_TOO_LONG, for a text or chat of more than `max_tokens` tokens, unless
        the job wants its prompts truncated. Its message names the model's context, which is one token longer."""
        try:
            return await self._encode(job, context, max_tokens if job.truncate_to is None else 0)
        except InvalidArgument as error:
            if error.code != PROMPT_TOO_LONG:
                raise
            raise with_context_length(error, max_tokens + 1) from error

    async def _encode(self, job: GenerateJob, context: RequestContext, max_tokens: int) -> EncodedPrompts:
        """Tokenize all prompts as `encode` does, each to at most `max_tokens` tokens (0: no bound)."""
        texts = [prompt.text for prompt in job.prompts if isinstance(prompt, TextPrompt)]
        encoded: list[NDArray[np.int32]] = []
        us = prompt_end = 0
        if texts:
            encoded, us = await self._client.encode(
                texts, context, add_special_tokens=job.add_special_tokens, max_tokens=max_tokens
            )
        following, ids = iter(encoded), []
        for prompt in job.prompts:
            if isinstance(prompt, TokenPrompt):
                ids.append(prompt.ids)
            elif isinstance(prompt, TextPrompt):
                ids.append(next(following))
            else:
                rendered, prompt_end, render_us = await self._client.render(prompt, context, max_tokens=max_tokens)
                ids.append(rendered)
                us += render_us
        return EncodedPrompts(ids, HopTiming("tokenizer", "encode", us, len(job.prompts)), prompt_end)

    async def bad_words(self, words: Sequence[str], context: RequestContext) -> list[tuple[int, ...]]:
        """Return the token sequences that spell the words, without their leading spaces. As in vLLM, a word yields the
        tokens that it has at the beginning of a text. It also yields the tokens that it has after a space, if they are
        as many and their first token differs, or if it has no tokens at the beginning. Raises the tokenizer's
        QuireError."""
        bare = [word.lstrip() for word in words]
        texts = [*bare, *(f" {word}" for word in bare)]
        encoded, _us = await self._client.encode(texts, context, add_special_tokens=False, max_tokens=0)
        found: list[tuple[int, ...]] = []
        for alone, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
            if len(alone):
                found.append(tuple(alone.tolist()))
            if len(spaced) and (not len(alone) or (len(spaced) == len(alone) and spaced[0] != alone[0])):
                found.append(tuple(spaced.tolist()))
        return found

    async def thinking(self, max_tokens: int) -> ThinkingBudget:
        """Return a budget of `max_tokens` for the model's thinking, together with the tokens that mark its begin and
        end. Raises InvalidArgument if the tokenizer knows no such tokens, and the tokenizer's QuireError."""
        start, end = await self._client.thinking_marks()
        if not start or not end:
            raise InvalidArgument(
                "MODEL_DOES_NOT_THINK",
                "thinking_token_budget is set, but the tokenizer knows no markers of this model's thinking.",
                "Leave it out, or start the tokenizer with --reasoning-config.",
                param="thinking_token_budget",
            )
        return ThinkingBudget(start, end, max_tokens)

    async def constrained(self, job: GenerateJob, context: RequestContext, prompt_end: int) -> GenerateJob:
        """Return the job with the compiled grammar that its answer must match, and with the tokenizer's warnings; a job
        without a structure is returned unchanged. In an answer to a chat, the constraint begins after the reasoning.
        This holds also for a StructuredOutput whose `prompt_end` says that an earlier call rendered the chat to token
        ids. After a chat, the returned job's StructuredOutput has the chat's prompt end. Raises InvalidArgument, which
        names the client's field, if the structure cannot be compiled, and other QuireErrors if no tokenizer compiles
        it."""
        structure = job.structure
        if structure is None:
            return job
        reasoning = any(isinstance(prompt, ChatPrompt) for prompt in job.prompts)
        if isinstance(structure, StructuredOutput):
            if reasoning:
                structure = replace(structure, prompt_end=dict(enumerate(PROMPT_ENDS)).get(prompt_end, "unknown"))
                job = replace(job, structure=structure)
            elif structure.prompt_end:
                reasoning, prompt_end = True, PROMPT_ENDS.index(structure.prompt_end)
        try:
            constraint, warnings = await self._client.compile(
                structure, context, reasoning=reasoning, prompt_end=prompt_end
            )
        except InvalidArgument as error:
            raise naming_field(error, structure) from error
        return replace(job, constraint=constraint, warnings=warnings)

    async def check_tool_parser(self) -> None:
        """Raise InvalidArgument if the tokenizer has no parser that finds tool calls in answers."""
        if not await self._client.tool_parser():
            raise InvalidArgument(
                "NO_TOOL_PARSER",
                "The request has tools, but the tokenizer has no parser for this model's tool calls.",
                "Start the tokenizer with --tool-call-parser, or leave the tools out.",
                param="tools",
            )

    async def text_of(self, prompt: Prompt, ids: NDArray[np.int32], *, cut: bool) -> str:
        """Return a prompt's text, for echo: a text as it came, otherwise the decoded `ids`. `cut`: the prompt was
        truncated, so the ids of a text are decoded, too. Returns '' for a chat."""
        if isinstance(prompt, TextPrompt) and not cut:
            return prompt.text
        return "" if isinstance(prompt, ChatPrompt) else await self._client.decode(ids)

    async def decode(self, ids: NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """Decode token ids to a whole text."""
        return await self._client.decode(ids, skip_special_tokens=skip_special_tokens)
