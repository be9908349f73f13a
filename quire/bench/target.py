"""Target: the server that receives the load, and the requests for it: streams of OpenAI's completions or chat, with
usage."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.batch.base_url import parse_base_url
from quire.bench.stream_connection import StreamConnection

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# Other names that vLLM's users write for the first.
ALIASES = {"vllm": "openai", "quire": "openai"}


@dataclass(frozen=True)
class Target:
    """`body` are further fields of every request; `headers` are sent with each request."""

    base_url: str
    endpoint: str
    chat: bool
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    insecure: bool = False
    keep_events: bool = False

    def to_json(self) -> str:
        """Encode the target as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Target:
        """Decode what `to_json` encoded."""
        return cls(**json.loads(line))

    async def connect(self) -> StreamConnection:
        """Open a new connection, by TLS if the URL says so; with `insecure`, any certificate is accepted. Raises
        OSError if the connection fails, and InvalidArgument if the base URL is malformed."""
        url = parse_base_url(self.base_url)
        context: ssl.SSLContext | None = None
        if url.secure:
            context = ssl.create_default_context()
            if self.insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: StreamConnection(keep_events=self.keep_events), url.host, url.port, ssl=context
        )
        return connection

    def request(self, prompt: str | Sequence[int], output_len: int, request_id: str) -> bytes:
        """Return one HTTP/1.1 POST request, head and body, for a streamed answer with usage of at most `output_len`
        tokens. For chat, the prompt is the user's message. The target's `body` has further fields, which take
        precedence over all but the prompt."""
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens" if self.chat else "max_tokens": output_len,
            **self.body,
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        body = json.dumps(fields, separators=(",", ":")).encode()
        parts = urlsplit(self.base_url)
        lines = [
            f"POST {parts.path.rstrip('/')}{self.endpoint} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"X-Request-Id: {request_id}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
