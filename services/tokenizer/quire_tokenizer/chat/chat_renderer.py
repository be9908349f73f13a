"""Renders a conversation to the text of a prompt, and finds the special tokens in it that the template wrote.

This module combines the checked conversation, the model's (or the request's) template, the rendering processes and the
provenance of special tokens. It knows nothing of protobuf, or of how text becomes tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateSyntaxError

from quire_common.errors import ConfigError, FailedPrecondition, InvalidArgument, PermissionDenied, TooLarge
from quire_tokenizer.chat.chat_template import ChatTemplate
from quire_tokenizer.chat.conversation import Conversation, parse_conversation
from quire_tokenizer.chat.provenance import Provenance, Rendering
from quire_tokenizer.chat.stand_ins import CONTINUATION_MARK
from quire_tokenizer.model_folder import DEFAULT_TEMPLATE, TOOL_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quire_tokenizer.chat.provenance import Disguise
    from quire_tokenizer.chat.render_pool import RenderPool
    from quire_tokenizer.vocabulary import Vocabulary
    from quire_tokenizer.work_pool import WorkPool

_MAX_TEMPLATE_CHARS = 1 << 20
_CACHED_PROVENANCES = 16
# Work on a longer conversation would hold up the event loop.
_INLINE_CHARS = 32_768
# A parsed conversation takes several times the memory of its JSON. Longer ones take turns.
_LARGE_CHARS = 262_144
T = TypeVar("T")


@dataclass(frozen=True)
class ChatRequest:
    """The options of one RenderChat request. Fields named `*_json` have the client's JSON."""

    messages_json: str
    tools_json: str = ""
    kwargs_json: str = ""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    template: str = ""


class ChatRenderer:
    """Used from one event loop. Compiles the model's templates on construction, to fail early."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        pool: RenderPool,
        work: WorkPool,
        *,
        max_bytes: int,
        allow_request_template: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._pool = pool
        self._work = work
        self._max_bytes = max_bytes
        self._allow_request_template = allow_request_template
        self._provenance = lru_cache(maxsize=_CACHED_PROVENANCES)(self._make_provenance)
        for name, source in vocabulary.templates.items():
            _compile(name, source)
            self._provenance(source)

    async def render(self, request: ChatRequest) -> Rendering:
        """Render the conversation by its chat template, and find the special tokens that the template wrote. Work on a
        conversation of more than 32,768 characters of JSON runs in threads; of those with more than 262,144, only a few
        are rendered at the same time (see `RenderPool.large_conversation`). Raises a QuireError for a bad conversation,
        a template that is missing, forbidden or fails, or too much waiting work; it concerns this request alone."""
        self._check(request)
        chars = len(request.messages_json) + len(request.tools_json) + len(request.kwargs_json)
        run = _run_here if chars <= _INLINE_CHARS else self._work.run
        if chars <= _LARGE_CHARS:
            return await self._render(request, run)
        async with self._pool.large_conversation():
            return await self._render(request, run)

    async def _render(self, request: ChatRequest, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> Rendering:
        """Parse a checked request, and render its template with the user's data. If that data could hold a special
        token, render the disguised data too, and reconcile both texts. Cut the text if the last message is to be
        continued. The pool's processes render; `run` runs the other steps that take longer for a longer conversation,
        here or in a thread."""
        conversation, source = await run(lambda: self._read(request))
        provenance, values = self._provenance(source), conversation.values
        plain = await self._pool.render(source, self._variables(request, values))
        disguise, disguised_values = await run(lambda: _disguised(provenance, values))
        if disguise is None:
            rendering = await run(lambda: provenance.undisguised(plain))
        else:
            disguised = await self._pool.render(source, self._variables(request, disguised_values))
            rendering = await run(lambda: provenance.reconcile(plain, disguised, disguise, values))
        return _cut(rendering) if conversation.continued else rendering

    def _read(self, request: ChatRequest) -> tuple[Conversation, str]:
        """Parse the conversation, and choose the source of its template. With `continue_final_message`, mark the end of
        the last message's text. Raises InvalidArgument or Unsupported for a bad conversation, and FailedPrecondition if
        there is no template."""
        conversation = parse_conversation(request.messages_json, request.tools_json, request.kwargs_json)
        source = self._source(request, conversation)
        if request.continue_final_message:
            conversation = conversation.marked_for_continuation()
        return conversation, source

    def _check(self, request: ChatRequest) -> None:
        """Raise InvalidArgument for options that exclude each other (generation prompt and continued message). Raise
        PermissionDenied for a template of the request if those are forbidden. Raise TooLarge if JSON and template
        together exceed the limit of bytes, or the template exceeds _MAX_TEMPLATE_CHARS."""
        if request.add_generation_prompt and request.continue_final_message:
            raise InvalidArgument(
                "CONFLICTING_PROMPT_END",
                "add_generation_prompt and continue_final_message exclude each other.",
                "Leave one out.",
                param="continue_final_message",
            )
        if request.template and not self._allow_request_template:
            raise PermissionDenied(
                "REQUEST_TEMPLATE_FORBIDDEN",
                "This service takes no chat templates from requests.",
                "Leave chat_template out, or start the tokenizer with --allow-request-chat-template.",
                param="chat_template",
            )
        fields = (request.messages_json, request.tools_json, request.kwargs_json, request.template)
        total = sum(len(field.encode(errors="surrogatepass")) for field in fields)
        if total > self._max_bytes or len(request.template) > _MAX_TEMPLATE_CHARS:
            raise TooLarge(
                "TEXT_TOO_LARGE",
                f"The conversation has {total} bytes; at most {self._max_bytes} are accepted.",
                "Send a shorter conversation.",
                param="messages",
            )

    def _source(self, request: ChatRequest, conversation: Conversation) -> str:
        """Return the template's source: the template of the request, else the model's template for tools if there are
        tools, else the model's default. Raises FailedPrecondition if there is none."""
        templates = self._vocabulary.templates
        source = request.template
        if not source and conversation.tools:
            source = templates.get(TOOL_TEMPLATE, "")
        source = source or templates.get(DEFAULT_TEMPLATE, "")
        if not source:
            raise FailedPrecondition(
                "NO_CHAT_TEMPLATE",
                f"The model {self._vocabulary.model} has no chat template.",
                "Use a chat model, give --chat-template, or use completions instead of chat.",
            )
        return source

    def _variables(self, request: ChatRequest, values: dict[str, Any]) -> dict[str, Any]:
        """Return the template's variables: the user's values, then the texts of the model's special tokens and the
        request's two switches, which replace values of the same name. `documents` is None unless the user gives it."""
        ours = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        return {"documents": None, **values, **self._vocabulary.token_variables, **ours}

    def _make_provenance(self, source: str) -> Provenance:
        variables = "\n".join(self._vocabulary.token_variables.values())
        return Provenance(self._vocabulary.specials.values(), f"{source}\n{variables}")


async def _run_here(function: Callable[[], T]) -> T:
    return function()


def _disguised(provenance: Provenance, values: dict[str, Any]) -> tuple[Disguise | None, dict[str, Any]]:
    disguise = provenance.disguise_for(values)
    return disguise, values if disguise is None else disguise.put_on(values)


def _compile(name: str, source: str) -> None:
    """Raise ConfigError if this template of the model is not valid. `name` is the template's name, for the error."""
    try:
        ChatTemplate(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            "BAD_CHAT_TEMPLATE",
            f"The model's chat template {name!r} is not valid: line {error.lineno}: {error.message}.",
            "Correct it, or give another with --chat-template.",
            param="chat_template",
        ) from error


def _cut(rendering: Rendering) -> Rendering:
    """Cut the text at the continuation mark, where the last message's text ends, and drop special tokens beyond. If the
    space after the mark is gone, the template trims messages, and white space at the end is removed too. Raises
    InvalidArgument if the text has no mark."""
    end = rendering.text.rfind(CONTINUATION_MARK)
    if end < 0:
        raise InvalidArgument(
            "NOTHING_TO_CONTINUE",
            "The chat template does not show the last message's text, so it cannot be continued.",
            "Leave continue_final_message out.",
            param="continue_final_message",
        )
    trims = rendering.text[end + 1 : end + 2] != " "
    text = rendering.text[:end]
    text = text.rstrip() if trims else text
    return Rendering(text, tuple(span for span in rendering.specials if span[1] <= len(text)))
