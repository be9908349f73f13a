"""The codec of quire.v1.Inference names the field that is wrong."""

from __future__ import annotations

import pytest

from quire.v1 import inference_pb2 as ib
from quire_common.errors import InvalidArgument
from quire_router.front.grpc.request_codec import parse_generate
from quire_router.front.parameters.request_limits import Limits

LIMITS = Limits(128, 20)


@pytest.mark.parametrize("best_of", [129, 2**31 - 1, 2**31, 2**32 - 1])
def test_best_of_beyond_its_range_is_named(best_of: int) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_generate(ib.GenerateRequest(text="a", best_of=best_of), LIMITS)
    assert (error.value.code, error.value.param) == ("OUT_OF_RANGE", "best_of")


def test_a_sample_index_leaves_room_for_all_sequences() -> None:
    request = ib.GenerateRequest(text="a", best_of=4)
    request.sampling.sample = 2**31 - 5
    assert parse_generate(request, LIMITS).first_sample == 2**31 - 5
    request.sampling.sample += 1
    with pytest.raises(InvalidArgument, match=r"sampling\.sample"):
        parse_generate(request, LIMITS)
