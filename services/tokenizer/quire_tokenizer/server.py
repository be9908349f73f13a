"""The gRPC wiring of the tokenizer: which servicer is on the port, and what happens at start, drain and close."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from quire_common.telemetry.logs import get_logger
from quire_tokenizer.servicer import TokenizerServicer
from quire_tokenizer.text_service import TextService

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from quire_tokenizer.config import TokenizerConfig

log = get_logger(__name__)
_DRAIN_POLL_S = 0.05


class TokenizerService:
    name = "tokenizer"

    def __init__(self, config: TokenizerConfig) -> None:
        self._texts = TextService(config)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Put the Tokenizer contract on the server."""
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(TokenizerServicer(self._texts), server)
        return [tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name]

    async def start(self) -> None:
        """Load the model's files, which makes the service ready, and log the model, its vocabulary's size and the time.
        Raises ConfigError if the files cannot be found, read or used, and Unsupported for a kind of GGUF tokenizer that
        Quire does not have."""
        started = time.perf_counter()
        await self._texts.load()
        vocabulary = self._texts.tools.vocabulary
        log.info("loaded", model=vocabulary.model, vocabulary=vocabulary.size, seconds=time.perf_counter() - started)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests on Detokenize streams, and wait up to `timeout_s` for the open ones to finish. An idle
        stream is not waited for. Other calls are neither refused nor waited for here."""
        self._texts.drain()
        deadline = time.monotonic() + timeout_s
        while self._texts.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """Release threads and processes."""
        await self._texts.close()
