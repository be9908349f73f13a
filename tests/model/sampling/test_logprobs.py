from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_common.errors import Internal
from quire_worker.sampling.logprobs import logprob_columns


def test_columns_hold_what_was_asked_for() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)) * 3
    token = np.array([7, 8, 9, 10], np.int32)
    found = logprob_columns(logits, token, np.array([3, -1, 0, 500], np.int32))
    assert found is not None
    wanted = logits.double().log_softmax(-1)
    assert found.token_index.tolist() == [0, 2, 3]
    assert found.top_count.tolist() == [3, 0, 200]
    assert np.allclose(found.logprob, [wanted[0, 7], wanted[2, 9], wanted[3, 10]], atol=1e-6)
    order = wanted.argsort(dim=-1, descending=True)
    assert found.rank.tolist() == [1 + order[row].tolist().index(int(token[row])) for row in (0, 2, 3)]
    assert found.top_id.tolist() == order[0, :3].tolist() + order[3].tolist()
    assert np.allclose(found.top_logprob[3:], wanted[3][order[3]], atol=1e-5)


def test_equals_share_a_rank_and_the_lower_id_comes_first() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0]])
    found = logprob_columns(logits, np.array([3], np.int32), np.array([2], np.int32))
    assert found is not None
    assert found.rank.tolist() == [1]
    assert found.top_id.tolist() == [1, 2]


def test_nothing_asked_or_damaged_gives_nothing() -> None:
    logits = torch.zeros(2, 5)
    assert logprob_columns(logits, np.zeros(2, np.int32), np.full(2, -1, np.int32)) is None
    assert logprob_columns(logits, np.full(2, -1, np.int32), np.full(2, 3, np.int32)) is None


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(1))
    token, wanted = np.arange(5, dtype=np.int32), np.full(5, 4, np.int32)
    whole = logprob_columns(logits, token, wanted)
    alone = logprob_columns(logits[3:4], token[3:4], np.array([4], np.int32))
    assert whole is not None and alone is not None
    assert whole.logprob[3] == alone.logprob[0]
    assert np.array_equal(whole.top_logprob[12:16], alone.top_logprob)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_logits_are_a_typed_error_of_rows_that_are_asked_for(value: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = value
    with pytest.raises(Internal, match="NAN_LOGITS"):
        logprob_columns(logits, np.zeros(2, np.int32), np.full(2, 3, np.int32))
    assert logprob_columns(logits, np.array([0, -1], np.int32), np.full(2, 3, np.int32)) is not None
