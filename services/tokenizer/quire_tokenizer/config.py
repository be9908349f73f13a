"""The tokenizer's configuration. Every list, text and queue that a request can grow has its bound here."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.config import ServiceConfig, option


@dataclass(frozen=True)
class TokenizerConfig(ServiceConfig):
    """Text to tokens and back."""

    model: str = option(
        "",
        "folder of the model (tokenizer.json, tokenizer_config.json, generation_config.json), a GGUF file, or a name "
        "of the Hugging Face hub (org/name), whose files are downloaded where the hub's cache does not have them",
    )
    revision: str = option("", "branch, tag or commit of a model of the hub; default: main")
    tokenizer: str = option("", "folder, GGUF file or hub's name of the tokenizer, where it is not the model's")
    tokenizer_revision: str = option("", "branch, tag or commit of --tokenizer; default: main")
    download_dir: str = option("", "cache of the hub's models; default: HF_HUB_CACHE, or hub in HF_HOME")
    hf_overrides: str = option(
        "", "JSON, the same as the worker's: of the fields that replace those of config.json, eos_token_id counts here"
    )
    chat_template: str = option("", "file with a chat template to use instead of the model's")
    reasoning_config: str = option(
        "", "vLLM's JSON: reasoning_start_str and reasoning_end_str, around what the model thinks (default: found)"
    )
    tool_call_parser: str = option(
        "", "vLLM's name of the parser that finds tool calls in answers; none; default: as the chat template shows"
    )
    reasoning_parser: str = option(
        "", "vLLM's name of the parser that finds reasoning in answers; none; default: as the chat template shows"
    )
    allow_request_chat_template: bool = option(False, "let requests bring a chat template of their own")
    encode_threads: int = option(2, "threads that encode and decode texts too long for the event loop", at_least=1)
    max_texts: int = option(1024, "texts of one Encode or Decode", at_least=1)
    max_text_bytes: int = option(16 << 20, "UTF-8 bytes of one request's texts or conversation", at_least=1)
    max_waiting: int = option(256, "encodings, and renderings, that may run or wait; more are refused", at_least=1)
    max_token_ids: int = option(1 << 20, "token ids of one Decode, GetTokenBytes or resumed request", at_least=1)
    render_processes: int = option(
        2, "child processes that render chat templates, started when first needed", at_least=1
    )
    render_timeout_s: float = option(2.0, "time that one rendering may take", at_least=0.01)
    render_memory_mb: int = option(512, "address space of a rendering process", at_least=64)
    grammar_processes: int = option(
        2, "child processes that compile grammars of structured output, started when first needed", at_least=1
    )
    grammar_timeout_s: float = option(2.0, "processor time that compiling one grammar may take", at_least=0.01)
    grammar_memory_mb: int = option(1024, "address space of a compiling process beside the tokenizer", at_least=64)
    grammar_cache: int = option(1024, "compiled grammars that are kept", at_least=1)
    max_streams: int = option(256, "Detokenize streams open at once", at_least=1)
    max_handles: int = option(8192, "requests open at once on one Detokenize stream", at_least=1)
    max_stop_strings: int = option(64, "stop strings of one request", at_least=0)
    max_stop_chars: int = option(512, "characters of one stop string", at_least=1)
    max_stop_token_ids: int = option(1024, "stop token ids of one request", at_least=0)
