"""Channels that follow their credentials: what is left of them after they are closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc

from quire_common.identity.watched_channel import WatchedAioChannel, WatchedChannel


async def test_close_right_after_a_change_closes_the_old_channel_too() -> None:
    credentials: Any = SimpleNamespace(value=None, generation=0)
    channel = WatchedAioChannel(credentials, lambda _: grpc.aio.insecure_channel("127.0.0.1:1"))
    before = channel.current()
    credentials.generation = 1
    assert channel.current() is not before
    await channel.close()
    assert before.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_a_closed_channel_makes_no_other() -> None:
    credentials: Any = SimpleNamespace(value=None, generation=0)
    channel = WatchedChannel(credentials, lambda _: grpc.insecure_channel("127.0.0.1:1"))
    before = channel.current()
    channel.close()
    credentials.generation = 1
    assert channel.current() is before
