"""The calls of the tokenizer service other than Detokenize, with plain values. TokenizerPool chooses a healthy
tokenizer for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2 as pb
from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32
from quire_common.sequence import RequestContext, context_to_pb
from quire_common.structured.constraint import constraint_from_pb
from quire_router.sequences.structured import RequiredTools, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from quire_common.structured.constraint import Constraint
    from quire_router.sequences.job import ChatPrompt
    from quire_router.sequences.structured import AnswerStructure
    from quire_router.text.tokenizer_link import TokenizerLink
    from quire_router.text.tokenizer_pool import TokenizerPool

_TIMEOUT_S = 60.0


async def _marks_of(peer: TokenizerLink) -> tuple[tuple[int, ...], tuple[int, ...]]:
    info = peer.info  # a healthy tokenizer has sent its info
    return ((), ()) if info is None else (info.thinking_start, info.thinking_end)


async def _tool_parser_of(peer: TokenizerLink) -> str:
    return "" if peer.info is None else peer.info.tool_parser


def _uncompiled(structure: StructuredOutput) -> pb.Constraint:
    """Convert the structure that a client asks for (schema, regex, grammar) to a message with its text, for the
    tokenizer to compile."""
    return pb.Constraint(
        kind=structure.kind,
        text=structure.text,
        strict=structure.strict,
        disable_any_whitespace=structure.disable_any_whitespace,
        disable_additional_properties=structure.disable_additional_properties,
        whitespace_pattern=structure.whitespace_pattern,
    )


class TokenizerClient:
    """Calls raise QuireError. `encode` and `render` also return the microseconds that the tokenizer took."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool

    async def encode(
        self, texts: Sequence[str], context: RequestContext, *, add_special_tokens: bool, max_tokens: int
    ) -> tuple[list[NDArray[np.int32]], int]:
        """Return the token ids of each text, and the tokenizer's microseconds. Raises PROMPT_TOO_LONG if a text has
        more than `max_tokens` tokens (0: no bound)."""
        request = tb.EncodeRequest(
            context=context_to_pb(context), texts=texts, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        response = await self._pool.call(lambda peer: peer.encode(request))
        return [i32(column, "token_ids") for column in response.token_ids], response.elapsed_us

    async def render(
        self, prompt: ChatPrompt, context: RequestContext, *, max_tokens: int
    ) -> tuple[NDArray[np.int32], int, int]:
        """Return the token ids of a conversation, its quire.v1.PromptEnd, and the tokenizer's microseconds. The
        PromptEnd says whether the prompt ends within reasoning or after it. Raises PROMPT_TOO_LONG if the conversation
        has more than `max_tokens` tokens (0: no bound)."""
        request = tb.RenderChatRequest(
            context=context_to_pb(context),
            messages_json=prompt.messages_json,
            tools_json=prompt.tools_json,
            template_kwargs_json=prompt.template_kwargs_json,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            chat_template=prompt.template,
            max_tokens=max_tokens,
            ids_only=True,
        )
        response = await self._pool.call(lambda peer: peer.render(request))
        return i32(response.token_ids, "token_ids"), response.prompt_end, response.elapsed_us

    async def compile(
        self, structure: AnswerStructure, context: RequestContext, *, reasoning: bool, prompt_end: int
    ) -> tuple[Constraint, tuple[str, ...]]:
        """Let a tokenizer compile the structure to a grammar. Returns the grammar that an answer must match, and the
        parts of `structure` that the grammar does not enforce. `reasoning`: the answer may begin with reasoning.
        `prompt_end` is the quire.v1.PromptEnd that `render` returned."""
        request = tb.CompileGrammarRequest(
            context=context_to_pb(context),
            reasoning=reasoning,
            prompt_end=prompt_end,  # type: ignore[arg-type]  # the number that a tokenizer has sent
        )
        if isinstance(structure, RequiredTools):
            request.tools.tools_json, request.tools.name = structure.tools_json, structure.name
            request.tools.required, request.tools.parallel = structure.required, structure.parallel
        else:
            request.constraint.CopyFrom(_uncompiled(structure))
        response = await self._pool.call(lambda peer: peer.compile(request))
        return constraint_from_pb(response.constraint), tuple(response.warnings)

    async def decode(self, ids: NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, decoded as a whole by a tokenizer; special tokens are left out by default.
        Raises QuireError if no tokenizer answers, or the tokenizer refuses the ids."""
        request = tb.DecodeRequest(token_ids=[pack_i32(ids)], skip_special_tokens=skip_special_tokens)
        response = await self._pool.call(lambda peer: peer.stub.Decode(request, timeout=_TIMEOUT_S))
        return str(response.texts[0])

    async def thinking_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token ids that begin the model's thinking, and those that end it. Both are empty if the tokenizer
        knows no such markers."""
        return await self._pool.call(_marks_of)

    async def tool_parser(self) -> str:
        """Return the name of the parser that the tokenizers use for tool calls; empty if they have none."""
        return await self._pool.call(_tool_parser_of)

    async def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id, in the order of `ids`."""
        request = tb.GetTokenBytesRequest(token_ids=pack_i32(ids))
        response = await self._pool.call(lambda peer: peer.stub.GetTokenBytes(request, timeout=_TIMEOUT_S))
        return list(response.token_bytes)
