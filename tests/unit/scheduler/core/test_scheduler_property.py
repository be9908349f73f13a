"""Whatever arrives, is aborted or runs short: every request ends with exactly the tokens of the undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import Grant
from quire_common.finish import FinishReason
from quire_common.pages import chain_hashes
from quire_common.sequence import Sequence
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed
from tests.tiers import examples

TENANTS = ("a", "b", "c")


@dataclass(frozen=True)
class Arrival:
    at: int
    prompt: int
    seed: int
    max_tokens: int
    ignore_eos: bool
    min_tokens: int
    tenant: str
    priority: int
    session: int
    abort_at: int | None
    resumed: int
    logprobs: int
    skip: bool
    # What its router believes of its pages, rightly or wrongly.
    held: int | None

    def sequence(self, vocab: int) -> Sequence:
        # Few seeds: prompts share prefixes, and so pages in the store.
        ids = np.random.default_rng(self.seed).integers(2, vocab, 64)[: self.prompt]
        whole = a_sequence(ids, self.max_tokens, ignore_eos=self.ignore_eos, min_tokens=self.min_tokens)
        emitted = undisturbed(whole)[0]
        output = np.array(emitted[: min(self.resumed, len(emitted) - 1)], np.int32)
        more = {"output_ids": output, "skip_cache_read": self.skip, "logprobs": self.logprobs}
        return a_sequence(ids, self.max_tokens, ignore_eos=self.ignore_eos, min_tokens=self.min_tokens, **more)


arrivals = st.builds(
    Arrival,
    at=st.integers(0, 30),
    prompt=st.integers(1, 40),
    seed=st.integers(0, 2),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 6),
    tenant=st.sampled_from(TENANTS),
    priority=st.integers(-2, 2),
    session=st.integers(0, 2),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 50)),
    resumed=st.sampled_from([0, 0, 0, 3]),
    logprobs=st.sampled_from([-1, -1, 1]),
    skip=st.booleans(),
    held=st.sampled_from([None, 0, 0, 20]),
)


def find_all_hits(rig: Rig) -> None:
    """From now on each start is compared with what was there or promised: nothing of it may be computed again."""
    plan, replica = rig.core.next_grant, rig.core._replica

    def available() -> list[dict[bytes, int]]:
        groups = range(replica.pools.groups)
        promised = [{d: p.page for d, p in replica.cache._promised[group].items()} for group in groups]
        return [promised[group] | dict(replica.names.pages(group)) for group in groups]

    def planned(now: float) -> Grant | None:
        before = available()
        grant = plan(now)
        after = available()
        for start in [] if grant is None else grant.start:
            if start.sequence.skip_cache_read:
                continue
            known = np.concatenate([start.sequence.prompt_ids, start.sequence.output_ids])
            there = 0
            for digest in chain_hashes(known[:-1], replica.page_size):
                pages = [b.get(digest) for b in before]
                # What was evicted for this very Grant is of no use to its starts.
                if (
                    None in pages
                    or pages != [a.get(digest) for a in after]
                    or pages[0] in start.pages[0][start.cached_len // replica.page_size :]
                ):
                    break
                there += 1
            assert start.cached_len >= there * replica.page_size, "a prefix is computed twice"
        return grant

    if rig.core._replica.cache.enabled:
        rig.core.next_grant = planned  # type: ignore[method-assign]  # the spy


def check_named(rig: Rig) -> None:
    """What has a name is there, as far as the worker has come."""
    for group, marks in enumerate(rig.worker.marks):
        for page in rig.core.names.pages(group).values():
            assert marks.is_ready(page), f"page {page} has a name and is not whole"


@examples(150)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=16),
    num_pages=st.integers(18, 60),
    page_size=st.sampled_from([2, 4, 5]),
    max_num_seqs=st.integers(1, 6),
    groups=st.sampled_from([1, 1, 2]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    chunk=st.sampled_from([0, 1, 3, 16]),
    batch=st.sampled_from([7, 16, 512]),
    partial=st.integers(1, 3),
    kvstore=st.booleans(),
    fail_moves=st.sampled_from([0.0, 0.5]),
    depth=st.integers(1, 3),
    coalesce=st.sampled_from([1, 1, 2, 4]),
    lockstep=st.sampled_from([True, False, False]),
    delay=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    noise=st.integers(0, 99),
    lose=st.sampled_from([0.0, 0.0, 0.01]),
    cache=st.sampled_from([True, True, True, False]),
)
def test_random_disturbance_changes_no_tokens(
    requests: list[Arrival],
    num_pages: int,
    page_size: int,
    max_num_seqs: int,
    groups: int,
    policy: str,
    chunk: int,
    batch: int,
    partial: int,
    kvstore: bool,
    fail_moves: float,
    depth: int,
    coalesce: int,
    lockstep: bool,
    delay: tuple[int, int],
    noise: int,
    lose: float,
    cache: bool,
) -> None:
    hello = make_hello(num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, groups=groups)
    worker = FakeWorker(hello, depth=depth, coalesce=coalesce, fail_moves=fail_moves, lose_pages=lose)
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_batched_tokens=batch,
        long_prefill_token_threshold=chunk,
        max_num_partial_prefills=partial,
        lockstep=lockstep,
        enable_prefix_caching=cache,
    )
    rng = np.random.default_rng(noise)
    to_worker, back = (lambda most=most: int(rng.integers(0, most + 1)) for most in delay)
    rig = Rig(config, kvstore=kvstore, worker=worker, grant_delay=to_worker, report_delay=back)
    find_all_hits(rig)
    todo = sorted(enumerate(requests), key=lambda item: item[1].at)
    sequences = {}
    turn = 0
    while todo or turn < 60:
        while todo and todo[0][1].at <= turn:
            handle, one = todo.pop(0)
            sequence = one.sequence(hello.model.vocab_size)
            if sequence.known_len < rig.core.max_len:
                whose: dict[str, Any] = {"tenant": one.tenant, "priority": one.priority, "held_tokens": one.held}
                rig.submit(handle, sequence, session=one.session, **whose)
                sequences[one.session, handle] = (sequence, one)
        for handle, one in enumerate(requests):
            if one.abort_at == turn:
                rig.core.abort(one.session, handle, rig.now)
        rig.step()
        rig.core.check_integrity()
        if groups == 1:
            check_named(rig)
        turn += 1
    rig.run()
    assert worker.max_decoders <= max_num_seqs and worker.max_partial <= partial
    for key, (sequence, one) in sequences.items():
        expected, finish = undisturbed(sequence, max_len=rig.core.max_len)
        fresh = expected[len(sequence.output_ids) :]
        if key in rig.errors:
            assert rig.errors[key].code == "PAGES_LOST" and lose
        elif rig.ends[key] is FinishReason.ABORT:
            assert one.abort_at is not None
            assert rig.tokens[key] == fresh[: len(rig.tokens[key])]
        else:
            assert rig.tokens[key] == fresh
            assert rig.ends[key].value == finish.value
            note = rig.notes[key]
            assert (note.prompt_tokens, note.completion_tokens) == (len(sequence.prompt_ids), len(expected))
            most = len(sequence.prompt_ids) - (0 if len(sequence.output_ids) else 1)
            assert note.cached_tokens <= (most if cache or kvstore else 0)
            assert (note.stop_token_id >= 0) == (finish.name == "STOP")
            assert len(rig.logprobs[key]) == (len(fresh) if one.logprobs >= 0 else 0)
