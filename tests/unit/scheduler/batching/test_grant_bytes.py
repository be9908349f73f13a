"""A Grant is bounded in bytes, however many long requests wait: the others start with the next one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire_common.credit import MoveKind, PageMove, Start, encode_grant, start_bytes
from quire_common.credit.grant import Grant
from quire_common.credit.hello import Epoch
from quire_common.logit_controls import LogitControls
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_scheduler.batching.admission import MAX_START_BYTES, MAX_START_VALUES
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import make_hello
from tests.tiers import deep_after

TOKENS = 100_000


def a_core(requests: int, tokens: int = TOKENS) -> Scheduler:
    pages = max(60_000, tokens)
    hello = make_hello(num_pages=pages, page_size=16, max_num_seqs=256, num_slots=512, max_model_len=tokens + 100)
    core = Scheduler(SchedulerConfig(), hello)
    document = np.arange(tokens) % 90 + 2
    for handle in range(requests):
        document[-1] = handle % 90 + 2
        core.submit(0, handle, RequestContext(f"r{handle}"), a_sequence(document.copy()), 1.0)
    return core


@pytest.mark.parametrize("requests", deep_after(1, [50, 200]))
def test_starts_of_one_grant_have_bounded_bytes(requests: int) -> None:
    core, started, sizes = a_core(requests), list[int](), list[int]()
    while grant := core.next_grant(1.0):
        sizes.append(encode_grant(grant).ByteSize())
        started += [start.order_key for start in grant.start]
        assert len(sizes) <= requests
    assert len(started) == requests
    assert len(sizes) > 2, "one Grant does not hold them all"
    assert started == sorted(started), "requests overtook one another"
    assert max(sizes) <= MAX_START_BYTES, f"a Grant of {max(sizes) / 2**20:.1f} MiB"
    core.check_integrity()


def test_one_request_larger_than_the_bound_starts_alone() -> None:
    core, counts = a_core(3, tokens=MAX_START_BYTES // 4), list[int]()
    while grant := core.next_grant(1.0):
        counts.append(len(grant.start))
    assert counts == [1] * len(counts)
    assert len(counts) >= 1


def test_starts_of_one_grant_have_bounded_control_values() -> None:
    """Their checks and rows cost the model thread more than a millisecond each, in one piece."""
    core, counts = a_core(0, tokens=100), list[int]()
    controls = LogitControls(allowed_token_ids=tuple(range(16_384)))
    sequence = replace(a_sequence(np.arange(20) + 2), sampling=Sampling(controls=controls))
    for handle in range(64):
        core.submit(0, handle, RequestContext(f"r{handle}"), sequence, 1.0)
    while grant := core.next_grant(1.0):
        counts.append(len(grant.start))
        assert len(counts) <= 64
    assert sum(counts) == 64
    assert max(counts) == MAX_START_VALUES // 16_384
    core.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_start_bytes_is_an_upper_bound(seed: int) -> None:
    """A Start of random fields, each at times at its longest."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 2**31 - 1, int(rng.integers(0, most + 1))).tolist())

    def text(most: int) -> str:
        return "\N{GRINNING FACE}" * int(rng.integers(0, most + 1))

    controls = LogitControls(
        presence_penalty=1.5,
        frequency_penalty=-1.25,
        repetition_penalty=1.125,
        logit_bias=tuple((token, 3.3) for token in ids(1024)),
        allowed_token_ids=ids(16_384),
        bad_words=tuple((token,) * int(rng.integers(1, 17)) for token in ids(1024)),
    )
    thinking = ThinkingBudget((1, 2**31 - 1), (2**31 - 1,) * 16, 2**31)
    sequence = Sequence(
        np.array(ids(5_000), np.int32),
        Stop(2**31, 2**31, ids(1024), True),
        Sampling(1.5, 2**31 - 1, 0.5, 0.5, 2**64 - 1, 2**31, 255, controls, 255, (text(60), text(60))),
        np.array(ids(5_000), np.int32),
        text(4096),
        True,
        thinking if seed % 2 else None,
    )
    context = RequestContext(text(4096), 2**31, text(4096), 2**62, -1, text(4096), text(4096))
    tables = tuple(rng.integers(0, 2**31 - 1, int(rng.integers(0, 2_000))).astype(np.int32) for _ in range(2))
    start = Start(2**31 - 1, 2**62, sequence, 2**31 - 1, tables, 2**31 - 1, context, 2**31 - 1)
    empty = encode_grant(Grant(Epoch(1, 1), 1)).ByteSize()
    size = encode_grant(Grant(Epoch(1, 1), 1, start=[start])).ByteSize() - empty
    most = start_bytes(sequence, context, sum(map(len, tables)))
    assert size <= most
    plain = replace(sequence, sampling=Sampling(), cache_salt="", thinking=None)
    least = start_bytes(plain, RequestContext(""), 0)
    assert least <= 4 * (sequence.known_len + len(sequence.stop.stop_token_ids)) + 1024, "the bound is not far above"


def test_start_bytes_counts_each_page_with_its_move() -> None:
    """A load names each page of the Start once more, with its hash."""
    sequence, context = a_sequence(5), RequestContext("r")
    pages = np.arange(2_000, dtype=np.int32)
    start = Start(0, 1, sequence, 0, (pages,), 10, context, 100)
    load = PageMove(1, MoveKind.LOAD, 0, pages, (bytes(32),) * len(pages))
    empty = encode_grant(Grant(Epoch(1, 1), 1)).ByteSize()
    size = encode_grant(Grant(Epoch(1, 1), 1, start=[start], move=[load])).ByteSize() - empty
    assert size <= start_bytes(sequence, context, len(pages)) <= size + 1024
