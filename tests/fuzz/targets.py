"""The registry of targets. Each is imported alone, so that its process has what it needs and no more."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from tests.fuzz.target import Target


@dataclass(frozen=True)
class Entry:
    """The place of a target's class, and its part of a run's inputs."""

    module: str
    name: str
    share: int

    def load(self) -> type[Target]:
        return cast(type[Target], getattr(importlib.import_module(f"tests.fuzz.{self.module}"), self.name))


TARGETS: dict[str, Entry] = {
    "gguf": Entry("weight_targets", "GgufTarget", 20),
    "safetensors": Entry("weight_targets", "SafetensorsTarget", 20),
    "config.json": Entry("weight_targets", "ConfigTarget", 20),
    "tokenizer.json": Entry("text_targets", "TokenizerTarget", 5),
    "chat template": Entry("text_targets", "TemplateTarget", 2),
    "page header": Entry("wire_targets", "PageTarget", 20),
    "data frame": Entry("wire_targets", "FrameTarget", 20),
    "data port": Entry("data_targets", "DataPortTarget", 4),
    "API key file": Entry("key_targets", "KeyFileTarget", 15),
    "Redis endpoint": Entry("key_targets", "RedisEndpointTarget", 3),
    "Redis page": Entry("key_targets", "RedisPageTarget", 3),
    "Redis value": Entry("http_targets", "RedisValueTarget", 2),
    "HTTP body": Entry("http_targets", "BodyTarget", 40),
    "HTTP route": Entry("http_targets", "HttpTarget", 4),
    "router RPC": Entry("service_targets", "InferenceTarget", 4),
    "tokenizer RPC": Entry("service_targets", "TokenizerTarget", 4),
    "scheduler RPC": Entry("service_targets", "SchedulerTarget", 4),
    "kvstore RPC": Entry("service_targets", "KvstoreTarget", 6),
    "worker RPC": Entry("worker_target", "WorkerTarget", 4),
}
