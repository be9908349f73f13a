"""What an engine's sizes say of its KV pages."""

from __future__ import annotations

from quire_worker.engine.spec import EngineSpec


def test_kv_tokens_and_concurrency_leave_page_0_out_and_round_sequences_up_to_pages() -> None:
    spec = EngineSpec(
        max_num_seqs=4, max_model_len=50, vocab_size=8, page_size=16, num_pages=11, eos_token_ids=(), slots=4
    )
    assert spec.kv_tokens == 160
    assert spec.max_concurrency == 2.5
