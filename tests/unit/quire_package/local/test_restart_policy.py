from __future__ import annotations

from quire.local.keeper import RestartPolicy


def test_an_ordered_end_is_followed_at_once() -> None:
    assert RestartPolicy(1.0).delay_s(0, 5.0) == 0.0


def test_who_goes_on_dying_waits_longer_and_longer_up_to_a_limit() -> None:
    policy = RestartPolicy(0.1)
    delays = [policy.delay_s(-9, 1.0) for _ in range(12)]
    for number, delay in enumerate(delays):
        assert delay is not None
        assert min(0.1 * 2**number, 10.0) / 2 <= delay <= min(0.1 * 2**number, 10.0)


def test_a_long_life_makes_up_for_what_was_before() -> None:
    policy = RestartPolicy(0.1)
    for _ in range(6):
        policy.delay_s(-9, 1.0)
    delay = policy.delay_s(-9, 60.0)
    assert delay is not None
    assert delay <= 0.1


def test_who_cannot_start_is_given_up_until_somebody_asks() -> None:
    policy = RestartPolicy(0.1)
    delays = [policy.delay_s(2, None) for _ in range(5)]
    assert None not in delays[:4]
    assert delays[4] is None
    policy.reset()
    assert policy.delay_s(2, None) is not None


def test_one_start_that_succeeds_counts_for_all_that_failed() -> None:
    policy = RestartPolicy(0.1)
    for _ in range(4):
        policy.delay_s(2, None)
    policy.delay_s(-9, 1.0)
    assert policy.delay_s(2, None) is not None
