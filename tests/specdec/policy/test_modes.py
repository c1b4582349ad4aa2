"""Which mode of decoding is used, and what finding out may cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.modes import AheadChoice, DraftChoice, Outcome

ROUNDS = 3000


def note(
    choice: DraftChoice, mode: bool, tokens: float, seconds: float, extra_seconds: float = 0.0
) -> None:
    choice.record(mode, Outcome(tokens, seconds, extra_seconds))


def play(choice: DraftChoice, costs: dict[bool, tuple[float, float]], n: int = ROUNDS) -> dict:
    """Rounds of fixed (tokens, seconds) for each mode; how much time each one got."""
    spent = {False: 0.0, True: 0.0}
    for _ in range(n):
        mode = choice.next_uses_draft(costs.get(True, (1.0, 1.0))[1] - 1.0)
        tokens, seconds = costs[mode]
        note(choice, mode, tokens, seconds)
        spent[mode] += seconds
    return spent


@pytest.mark.parametrize("promised", [(5.0, 1.0), (1.0, 9.0)])
@pytest.mark.parametrize("draft", [(1.1, 3.0), (1.0, 40.0), (1.0, 1.2)])
def test_a_useless_draft_gets_little_of_the_time(promised, draft) -> None:
    costs = {False: (1.0, 1.0), True: draft}
    spent = play(DraftChoice(promised, 1.0), costs)
    lost = spent[True] * (1.0 - draft[0] / draft[1])
    assert lost < 0.03 * sum(spent.values())


@pytest.mark.parametrize("promised", [(5.0, 1.0), (1.0, 9.0)])
def test_a_useful_draft_gets_nearly_all_of_it(promised) -> None:
    spent = play(DraftChoice(promised, 1.0), {False: (1.0, 1.0), True: (4.0, 2.0)})
    assert spent[True] > 0.95 * sum(spent.values())


def test_a_draft_that_becomes_useful_is_noticed_and_left_again() -> None:
    choice = DraftChoice((3.0, 2.0), 1.0)
    bad, good = {False: (1.0, 1.0), True: (1.0, 2.0)}, {False: (1.0, 1.0), True: (4.0, 2.0)}
    play(choice, bad, 500)
    assert not choice.is_draft_better
    play(choice, good, 300)
    assert choice.is_draft_better
    play(choice, bad, 60)
    spent = play(choice, bad, 20)
    assert spent[False] > 3 * spent[True]


def test_what_came_out_corrects_what_was_planned() -> None:
    """The plan promises four tokens, and one comes."""
    choice = DraftChoice((4.0, 1.5), 1.0)
    n_drafted = 0
    for _ in range(30):
        mode = choice.next_uses_draft(0.5)
        n_drafted += mode
        note(choice, mode, 1, 1.5 if mode else 1.0)
    assert n_drafted <= 11


ROUND_LISTS = st.lists(st.tuples(st.integers(1, 6), st.floats(1.1, 4.0)), max_size=300)


@given(st.floats(1.0, 20.0), ROUND_LISTS)
def test_a_draft_never_overdraws_its_regret_budget(promised: float, rounds) -> None:
    """Whatever it promises and however long it did well; plain passes take a second.

    Beyond it are the share that time adds, and what the last round overdraws.
    """
    choice = DraftChoice((promised, 1.0), 1.0)
    balance, all_seconds = 0.0, 0.0
    for offered in rounds:
        mode = choice.next_uses_draft(0.1)
        tokens, seconds = offered if mode else (1, 1.0)
        note(choice, mode, tokens, seconds)
        balance += tokens - seconds
        all_seconds += seconds
        assert balance > -(2.0 + 0.015 * all_seconds + 3.0)


def test_a_draft_that_lost_may_lose_less_in_the_next_round() -> None:
    choice = DraftChoice((9.0, 1.0), 1.0)
    stakes = []
    while choice.next_uses_draft(0.1):
        stakes.append(choice.stake_seconds)
        note(choice, True, 1, 1.0 + stakes[-1])
    assert len(stakes) >= 3
    assert all(later < 0.6 * earlier for earlier, later in itertools.pairwise(stakes))


def test_a_draft_that_wins_may_stake_more() -> None:
    choice = DraftChoice((3.0, 2.0), 1.0)
    first = choice.stake_seconds
    assert choice.next_uses_draft(0.3)
    note(choice, True, 3, 2.0)
    assert choice.stake_seconds > first


def test_what_changing_the_way_takes_is_held_against_the_draft_but_is_not_its_pace() -> None:
    stakes, rates = [], []
    for extra in (0.0, 1.0):
        choice = DraftChoice((3.0, 2.0), 1.0)
        note(choice, True, 1, 1.2, extra)
        stakes.append(choice.stake_seconds)
        rates.append(choice.rate)
    assert stakes[0] == pytest.approx(stakes[1] + 0.5, abs=0.02)
    assert rates[0] == rates[1]


def test_a_level_that_takes_more_than_may_be_lost_is_not_tried() -> None:
    choice = DraftChoice((9.0, 1.0), 1.0)
    assert not any(choice.next_uses_draft(2.5) for _ in range(3))


def test_without_a_draft_model_there_is_nothing_to_choose() -> None:
    assert play(DraftChoice(None, 1.0), {False: (1.0, 1.0)}, 100)[True] == 0.0


def ahead_share(drafting: float, hidden: float, slowdown: float, n: int = 600) -> float:
    """Share of rounds with drafting ahead: passes of 1 s, drafting of so long, less when hidden."""
    choice, is_ahead, n_ahead = AheadChoice(), False, 0
    for _ in range(n):
        choice.record_drafting(is_ahead, hidden if is_ahead else drafting)
        is_ahead = choice.next_is_ahead(1.0)
        n_ahead += is_ahead
        choice.record_pass(is_ahead, slowdown if is_ahead else 1.0)
    return n_ahead / n


def test_drafting_ahead_is_used_where_it_saves_more_than_it_slows() -> None:
    assert ahead_share(drafting=0.8, hidden=0.2, slowdown=1.1) > 0.9
    assert ahead_share(drafting=0.8, hidden=0.2, slowdown=1.9) < 0.1
    assert ahead_share(drafting=0.8, hidden=0.8, slowdown=1.0) < 0.5  # which costs nothing


def test_trials_of_a_way_that_is_much_worse_are_rare() -> None:
    """Soon: of the first hundred rounds six pass before it is tried, four try the other way."""
    assert ahead_share(drafting=0.9, hidden=0.1, slowdown=1.05, n=100) > 0.88
    assert ahead_share(drafting=0.9, hidden=0.8, slowdown=1.9, n=100) < 0.09


def test_drafting_that_takes_no_time_is_not_worth_a_trial() -> None:
    assert ahead_share(drafting=0.02, hidden=0.0, slowdown=1.0) == 0.0


def test_a_draft_that_was_measured_in_a_bad_hour_is_tried_again() -> None:
    """A round with it seems to cost five tokens, until one is run: time pays for that one."""
    choice = DraftChoice((6.0, 2.0), 1.0)
    n_rounds, costs = 0, 5.0
    while not choice.next_uses_draft(costs):
        note(choice, False, 1, 1.0)
        n_rounds += 1
        assert n_rounds < 300
    assert n_rounds > 100


# --- the credit ----------------------------------------------------------------------------------


def test_a_draft_comes_back_after_the_machine_stood_still() -> None:
    """However long that was: a few hundred tokens, not thousands."""
    choice = DraftChoice((6.0, 2.0), 1.0)
    note(choice, True, 1, 5000.0)
    n_rounds = 0
    while not choice.next_uses_draft(0.1):
        note(choice, False, 1, 1.0)
        n_rounds += 1
        assert n_rounds < 400


@given(st.integers(2, 500), st.floats(0.0, 1.0))
def test_what_was_won_is_not_staked_once_the_draft_is_worse(n_tokens: int, price: float) -> None:
    choice = DraftChoice((4.0, 2.0), 1.0)
    note(choice, True, n_tokens, 1.0)
    while choice.is_draft_better:
        note(choice, True, 0, 10.0)
    choice.next_uses_draft(price)
    assert choice.stake_seconds <= 1.0  # half of two tokens


def test_what_n_grams_bring_without_a_draft_is_not_held_against_it() -> None:
    """Nine tokens in a pass, until the draft is tried again by what time has paid for."""
    choice = DraftChoice((4.0, 1.6), 1.0)
    for _ in range(3):
        note(choice, True, 0, 8.0)
    assert not choice.is_draft_better
    n_alone = 0
    while not choice.next_uses_draft(0.1):
        note(choice, False, 9, 1.0)
        n_alone += 1
    assert n_alone < 40
    for _ in range(12):
        note(choice, choice.next_uses_draft(0.1), 8, 1.0)
    assert choice.is_draft_better
