"""TextService: the state of the tokenizer process. It has the vocabulary, the tools that use it, and the number of
streams.

It is made empty, so that the port can open at once, and becomes ready when the model's files have been read. It knows
nothing of gRPC.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from quire_common.config import parse_object
from quire_common.errors import Overloaded, Unavailable
from quire_common.model_hub import resolve_model
from quire_common.telemetry.logs import get_logger
from quire_tokenizer import statistics
from quire_tokenizer.chat.chat_renderer import ChatRenderer
from quire_tokenizer.chat.render_pool import RenderLimits, RenderPool
from quire_tokenizer.detokenize.detokenizer import Detokenizer, StreamLimits
from quire_tokenizer.detokenize.whole_decoder import WholeDecoder
from quire_tokenizer.encoder import Encoder
from quire_tokenizer.grammar.grammar_compiler import GrammarCompiler, GrammarLimits
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_tokenizer.config import TokenizerConfig


log = get_logger(__name__)
# A thread costs more than a copy of so many ids.
_INLINE_TOKENS = 65_536
T = TypeVar("T")


@dataclass(frozen=True)
class TextTools:
    """The tools that exist once the model is loaded."""

    vocabulary: Vocabulary
    encoder: Encoder
    renderer: ChatRenderer
    whole_decoder: WholeDecoder
    grammars: GrammarCompiler


class TextService:
    """The state of the process. Only one event loop may use it."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._work = WorkPool(config.encode_threads, config.max_waiting)
        limits = RenderLimits(config.render_timeout_s, config.render_memory_mb << 20, config.max_text_bytes)
        self._renders = RenderPool(config.render_processes, config.max_waiting, limits)
        self._limits = StreamLimits(
            config.max_handles,
            config.max_stop_strings,
            config.max_stop_chars,
            config.max_stop_token_ids,
            config.max_token_ids,
        )
        self._tools: TextTools | None = None
        self._streams: set[Detokenizer] = set()
        self._draining = False

    @property
    def tools(self) -> TextTools:
        """Return the tools. Raises Unavailable while the model is being loaded."""
        if self._tools is None:
            raise Unavailable(
                "TOKENIZER_LOADING", "The tokenizer is being loaded.", "Retry in a moment.", retry_after_s=1.0
            )
        return self._tools

    async def load(self) -> None:
        """Read the model's files in a thread, and make the tools; see `_load` for its errors."""
        self._tools = await self._work.run(self._load)

    async def run_copy(self, function: Callable[[], T], tokens: int) -> T:
        """Run a function that copies this many token ids: here, or in a thread if they are many."""
        return function() if tokens <= _INLINE_TOKENS else await self._work.run(function, completes=True)

    @contextlib.contextmanager
    def detokenizing(self) -> Iterator[Detokenizer]:
        """Return a context that yields the state of a Detokenize stream, and counts the stream while it is open. Raises
        Overloaded if too many streams are open, and Unavailable before the model is loaded. While the process drains,
        the stream takes no new request."""
        vocabulary = self.tools.vocabulary
        if len(self._streams) >= self._config.max_streams:
            raise Overloaded(
                "TOO_MANY_STREAMS",
                f"{len(self._streams)} Detokenize streams are open.",
                "Use one stream for many requests, or run more tokenizers.",
                retry_after_s=1.0,
            )
        detokenizer = Detokenizer(vocabulary, self._limits, statistics.ended)
        if self._draining:
            detokenizer.drain()
        self._streams.add(detokenizer)
        try:
            with statistics.streaming():
                yield detokenizer
        finally:
            self._streams.discard(detokenizer)

    def drain(self) -> None:
        """Let no further request start on a stream."""
        self._draining = True
        for detokenizer in self._streams:
            detokenizer.drain()

    @property
    def open_requests(self) -> int:
        """Return the number of requests on all streams that have not ended."""
        return sum(map(len, self._streams))

    async def close(self) -> None:
        """Close the threads without waiting for them, and end the child processes; one that renders ends when its
        request is cancelled."""
        self._work.close()
        await self._renders.close()
        if self._tools is not None:
            await self._tools.grammars.close()

    def _load(self) -> TextTools:
        """Find the files of the model and its tokenizer, download those of the hub, read them, and make the tools. Logs
        a warning if the model names no EOS token. Runs in a thread. Raises ConfigError if a file cannot be found or
        read, or an option or a file is malformed, and Unsupported for a kind of GGUF tokenizer that Quire does not
        have."""
        config = self._config
        model = resolve_model(config.model, config.revision, config.download_dir, tokenizer_only=True)
        tokenizer = resolve_model(
            config.tokenizer, config.tokenizer_revision, config.download_dir, param="tokenizer", tokenizer_only=True
        )
        overrides = parse_object(config.hf_overrides, "--hf-overrides") if config.hf_overrides else {}
        folder = read_model_files(model, tokenizer, config.chat_template, overrides)
        vocabulary = Vocabulary(folder, config.reasoning_config, config.tool_call_parser, config.reasoning_parser)
        if not vocabulary.eos_ids:
            log.warning("the model names no eos token: answers end at max_tokens or a stop string", model=folder.name)
        encoder = Encoder(vocabulary, self._work, max_texts=config.max_texts, max_text_bytes=config.max_text_bytes)
        renderer = ChatRenderer(
            vocabulary,
            self._renders,
            self._work,
            max_bytes=config.max_text_bytes,
            allow_request_template=config.allow_request_chat_template,
        )
        decoder = WholeDecoder(vocabulary, self._work, max_texts=config.max_texts, max_token_ids=config.max_token_ids)
        limits = GrammarLimits(
            config.grammar_processes,
            config.max_waiting,
            config.grammar_timeout_s,
            config.grammar_memory_mb << 20,
            config.grammar_cache,
        )
        return TextTools(vocabulary, encoder, renderer, decoder, GrammarCompiler(vocabulary, limits))
