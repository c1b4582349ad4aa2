"""What a way of decoding may lose, in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.allowance import Allowance

ROUNDS = st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(0.0, 0.1)), max_size=60)


@given(ROUNDS)
def test_what_is_won_is_put_by_while_the_way_is_in_use(rounds) -> None:
    allowance = Allowance(2.0)
    for tokens, worth in rounds:
        allowance.settle_up(tokens, worth)
    gain = sum(tokens - worth for tokens, worth in rounds)
    assert abs(allowance.tokens - 2.0 - gain) < 1e-9


@given(st.floats(1.0, 500.0), st.integers(0, 60))
def test_what_was_won_is_forgotten_once_it_is_not(gain: float, n_rounds: int) -> None:
    allowance = Allowance(2.0)
    allowance.settle_up(gain, 0.0)
    for _ in range(n_rounds):
        allowance.pass_time(1.0)
    allowance.limit(2.0)
    assert allowance.tokens == 2.0


def test_time_brings_a_small_share_of_what_is_decoded() -> None:
    allowance = Allowance(0.0)
    for _ in range(1000):
        allowance.pass_time(1.0)
    assert 10.0 < allowance.tokens < 20.0


def test_a_way_comes_back_after_the_machine_stood_still() -> None:
    """However long that was: a few hundred tokens, not thousands."""
    allowance = Allowance(2.0)
    allowance.settle_up(1.0, 5000.0)
    n_rounds = 0
    while allowance.tokens < 1.0:
        allowance.pass_time(1.0)
        n_rounds += 1
    assert n_rounds < 400
