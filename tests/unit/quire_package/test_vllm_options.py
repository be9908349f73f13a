"""vLLM's option names: neutral values, translations, refusals, and the page that lists them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine_options import stack_flags
from quire.errors import InvalidArgument, Unsupported
from tools import vllm_options_table

NEUTRAL = {
    "tensor_parallel_size": 1,
    "trust_remote_code": False,
    "enable_chunked_prefill": True,
    "tokenizer_mode": "auto",
    "disable_log_requests": True,
    "cpu_offload_gb": 0.0,
    "speculative_config": None,
}


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_neutral_values_are_accepted_and_change_nothing(name: str, value: Any) -> None:
    assert stack_flags({name: value}) == {}


def test_flags_and_yaml_spell_neutral_values_as_text() -> None:
    assert stack_flags({"tensor-parallel-size": "1", "trust-remote-code": "false"}) == {}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"swap_space": 2}, {"kvstore": {"ram-bytes": str(2 << 30)}}),
        ({"swap_space": 2, "kv_offloading_size": 3}, {"kvstore": {"ram-bytes": str(3 << 30)}}),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, {}),
        ({"compilation_config": '{"cudagraph_mode": "NONE"}'}, {"worker": {"enforce-eager": True}}),
        ({"compilation_config": 0}, {"worker": {"enforce-eager": True}}),
        ({"compilation_config": 3}, {}),
        *(
            ({"compilation_config": {"mode": mode}}, {"worker": {"enforce-eager": True}})
            for mode in ("NONE", "none", 0, "0")
        ),
        *(({"compilation_config": {"mode": mode}}, {}) for mode in (None, "VLLM_COMPILE", "stock_torch_compile", 3)),
        *(({"compilation_config": {"cudagraph_mode": mode}}, {}) for mode in (None, "FULL_AND_PIECEWISE", "full")),
    ],
)
def test_names_are_translated_and_quires_own_name_wins(options: dict[str, Any], flags: dict[str, Any]) -> None:
    assert stack_flags(options) == flags


@pytest.mark.parametrize(
    ("name", "value", "cause", "fix"),
    [
        ("trust_remote_code", True, "code of a model is never run", "architecture"),
        ("tensor_parallel_size", 2, "one worker runs on one GPU", "--replicas"),
        ("enable_lora", True, "LoRA adapters are not served", "merged"),
        ("compilation_config", {"backend": "inductor"}, "compilation-config has backend", "Leave it out"),
    ],
)
def test_a_refusal_has_its_cause_and_the_nearest_thing(name: str, value: Any, cause: str, fix: str) -> None:
    with pytest.raises(Unsupported, match=cause) as raised:
        stack_flags({name: value})
    assert raised.value.code == "UNSUPPORTED_OPTION"
    assert fix in raised.value.fix


def test_bad_values_of_translated_names_are_refused() -> None:
    for name, value in (
        ("swap_space", "much"),
        ("swap_space", -1),
        ("compilation_config", "{"),
        ("compilation_config", 99),
        ("compilation_config", {"level": 99}),
        ("compilation_config", {"mode": -1}),
        ("compilation_config", {"mode": True}),
        ("compilation_config", {"cudagraph_mode": "bogus"}),
    ):
        with pytest.raises(InvalidArgument, match=name.replace("_", "-")):
            stack_flags({name: value})


def test_the_page_is_what_the_tables_say() -> None:
    page = vllm_options_table.DOCUMENT.read_text()
    assert page == vllm_options_table.document(), "run `python -m tools.vllm_options_table`"
