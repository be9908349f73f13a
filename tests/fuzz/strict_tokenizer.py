"""A fake tokenizer that refuses what it cannot render, as the real one does. The real one is a target of its own."""

from __future__ import annotations

from typing import Any

from quire.v1 import tokenizer_pb2
from quire_common.errors import InvalidArgument, QuireError
from quire_tokenizer.chat.conversation import parse_conversation
from tests.fakes.fake_tokenizer import FakeTokenizer


class StrictTokenizer(FakeTokenizer):
    async def RenderChat(self, request: tokenizer_pb2.RenderChatRequest, context: Any) -> Any:
        parse_conversation(request.messages_json, request.tools_json, request.template_kwargs_json)
        try:
            return await super().RenderChat(request, context)
        except QuireError:
            raise
        except Exception as error:  # the fake knows texts alone
            raise InvalidArgument("BAD_MESSAGE", "The fake cannot render this.", "Send texts.") from error
