"""Answers of models of each family for given text, thoughts and tool calls, after the public description of their
chat templates. For tests of parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Render = Callable[[str, Sequence[Call]], str]


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(text: str, calls: Sequence[Call]) -> str:
    return "\n".join([*([text] if text else []), *(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)])


def mistral_list(text: str, calls: Sequence[Call]) -> str:
    return f"{text}[TOOL_CALLS] [{', '.join(map(_json, calls))}]" if calls else text


def mistral_named(text: str, calls: Sequence[Call]) -> str:
    return text + "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def llama3(text: str, calls: Sequence[Call]) -> str:
    return "; ".join(_json(call, "parameters") for call in calls) if calls else text


def llama3_tagged(text: str, calls: Sequence[Call]) -> str:
    return f"{text}<|python_tag|>{llama3('', calls)}" if calls else text


def granite(text: str, calls: Sequence[Call]) -> str:
    return f"{text}<|tool_call|>[{', '.join(map(_json, calls))}]" if calls else text


def phi4(text: str, calls: Sequence[Call]) -> str:
    return f"{text}functools[{', '.join(map(_json, calls))}]" if calls else text


def deepseek_v3(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"{text}<｜tool▁calls▁begin｜>{chr(10).join(bodies)}<｜tool▁calls▁end｜>" if calls else text


def deepseek_v31(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"{text}<｜tool▁calls▁begin｜>{''.join(bodies)}<｜tool▁calls▁end｜>" if calls else text


def kimi_k2(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"{text}<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>" if calls else text


def qwen3_coder(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_text_of(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )
    return "\n".join([*([text] if text else []), *bodies])


def minimax_m2(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_text_of(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"{text}<minimax:tool_call>\n{''.join(bodies)}</minimax:tool_call>" if calls else text


def glm45(text: str, calls: Sequence[Call]) -> str:
    bodies = (
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text_of(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )
    return "\n".join([*([text] if text else []), *bodies])


def pythonic(text: str, calls: Sequence[Call]) -> str:
    bodies = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(bodies)}]" if calls else text


def openai(text: str, calls: Sequence[Call]) -> str:
    messages = [f"<|channel|>final<|message|>{text}<|end|>"] if text else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


# Writers by parser: how such a model writes, and whether it can write text before its calls.
WRITERS: Mapping[str, Sequence[tuple[Render, bool]]] = {
    "hermes": [(hermes, True)],
    "mistral": [(mistral_list, True), (mistral_named, True)],
    "llama3_json": [(llama3, False), (llama3_tagged, True)],
    "granite": [(granite, True)],
    "phi4_mini_json": [(phi4, True)],
    "deepseek_v3": [(deepseek_v3, True)],
    "deepseek_v31": [(deepseek_v31, True)],
    "kimi_k2": [(kimi_k2, True)],
    "qwen3_coder": [(qwen3_coder, True)],
    "minimax_m2": [(minimax_m2, True)],
    "glm45": [(glm45, True)],
    "pythonic": [(pythonic, False)],
    "openai": [(openai, True)],
}
