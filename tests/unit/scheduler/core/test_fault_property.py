"""Requests that fail, by a client's mistake, a step that raises or NaN logits, among others that share their pages: no
request starts on a page that an error casts doubt on, no other request fails, and every token is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import Grant, Report
from quire_common.errors import Internal, InvalidArgument
from quire_common.finish import FinishReason
from quire_scheduler.batching import admission
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.prefix_cache import PrefixCache
from tests.fakes.scheduler.scheduler_rig import Rig
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed
from tests.tiers import examples
from tests.unit.scheduler.core.test_scheduler_property import Arrival, arrivals, find_all_hits

KINDS = {
    "mistake": InvalidArgument("NO_TOKEN_LEFT", "a mistake", "none"),
    "raised": Internal("STEP_FAILED", "raised", "none"),
    "nan": Internal("NAN_LOGITS", "nan", "none"),
}
FAULTS = st.dictionaries(st.integers(0, 11), st.tuples(st.integers(0, 50), st.sampled_from(sorted(KINDS))), max_size=5)


class SuspectPages:
    """Watches a core: what it was told to be damaged, and that it lets nobody start on that."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._told: set[tuple[int, int]] = set()
        self._plan, self._read = rig.core.next_grant, rig.core.on_report
        rig.core.next_grant = self._next_grant  # type: ignore[method-assign]  # the spy
        rig.core.on_report = self._on_report  # type: ignore[method-assign]  # the spy

    def _on_report(self, report: Report, now: float) -> Any:
        outputs = self._read(report, now)
        for _, error in report.error:
            if isinstance(error, Internal):
                self._told |= self._rig.worker.damage.of(error)
        # Pages that have been written anew since are sound.
        self._told &= self._rig.worker.damage.pages
        return outputs

    def _next_grant(self, now: float) -> Grant | None:
        grant = self._plan(now)
        size = self._rig.worker.page_size
        for start in [] if grant is None else grant.start:
            whole = start.cached_len // size
            for group, table in enumerate(start.pages):
                shared = {(group, int(page)) for page in table[:whole]}
                assert self._told.isdisjoint(shared & self._rig.worker.damage.pages), (
                    "a request starts on a page that an error casts doubt on"
                )
                self._told.difference_update((group, int(page)) for page in table[whole:])
        for group, page in [] if grant is None else zip(grant.grow_group, grant.grow_page, strict=True):
            self._told.discard((int(group), int(page)))
        return grant


@examples(150)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    faults=FAULTS,
    num_pages=st.integers(18, 60),
    max_num_seqs=st.integers(1, 6),
    groups=st.sampled_from([1, 1, 2]),
    depth=st.integers(1, 3),
    coalesce=st.sampled_from([1, 1, 2]),
    delay=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    noise=st.integers(0, 99),
    start_bytes=st.sampled_from([1, 1500, admission.MAX_START_BYTES]),
)
def test_errors_fail_only_their_own_requests(
    requests: list[Arrival],
    faults: dict[int, tuple[int, str]],
    num_pages: int,
    max_num_seqs: int,
    groups: int,
    depth: int,
    coalesce: int,
    delay: tuple[int, int],
    noise: int,
    start_bytes: int,
) -> None:
    rng = np.random.default_rng(noise)
    hello = make_hello(num_pages=num_pages, page_size=4, max_num_seqs=max_num_seqs, groups=groups)
    worker = FakeWorker(hello, depth=depth, coalesce=coalesce, rng=np.random.default_rng(noise))
    to_worker, back = (lambda most=most: int(rng.integers(0, most + 1)) for most in delay)
    rig = Rig(SchedulerConfig(), worker=worker, grant_delay=to_worker, report_delay=back)
    find_all_hits(rig)
    SuspectPages(rig)
    asked = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MAX_START_BYTES", start_bytes)
        for turn in range(60):
            for handle, one in enumerate(requests):
                if one.at == turn:
                    sequence = one.sequence(hello.model.vocab_size)
                    if sequence.known_len < rig.core.max_len:
                        if handle in faults:
                            at, kind = faults[handle]
                            worker.damage.faults[f"r{handle}"] = at, KINDS[kind]
                        rig.submit(
                            handle, sequence, session=one.session, request_id=f"r{handle}", priority=one.priority
                        )
                        asked[one.session, handle] = sequence
                if one.abort_at == turn:
                    rig.core.abort(one.session, handle, rig.now)
            rig.step()
            rig.core.check_integrity()
        rig.run()
    harmed = any(kind != "mistake" for _, kind in faults.values())
    for key, sequence in asked.items():
        expected = undisturbed(sequence, max_len=rig.core.max_len)[0]
        fresh = expected[len(sequence.output_ids) :]
        assert rig.tokens[key] == fresh[: len(rig.tokens[key])], "a wrong token"
        if key in rig.errors:
            code = rig.errors[key].code
            own = key[1] in faults and code == KINDS[faults[key[1]][1]].code
            assert own or (harmed and code in ("NAN_LOGITS", "PAGES_LOST")), (key, code)
        elif rig.ends[key] is not FinishReason.ABORT:
            assert rig.tokens[key] == fresh


def test_property_notices_a_core_that_trusts_damaged_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "drop_suspect_pages", lambda *_: None)
    monkeypatch.setattr(PrefixCache, "drop_suspect_content", lambda *_: None)
    prompts = [Arrival(at, 24, 1, 8, True, 0, "a", 0, 0, None, 0, -1, False, None) for at in (0, 12, 20, 24)]
    with pytest.raises(AssertionError):
        test_errors_fail_only_their_own_requests.hypothesis.inner_test(  # type: ignore[attr-defined]  # hypothesis adds it
            prompts, {1: (0, "nan")}, 60, 4, 1, 1, 1, (0, 0), 1, admission.MAX_START_BYTES
        )
