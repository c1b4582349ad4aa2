"""The choice of the decoding mode, and the cost of exploring it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.modes import DraftChoice, Outcome

ROUNDS = 3000


def note(
    choice: DraftChoice, mode: bool, tokens: float, seconds: float, extra_seconds: float = 0.0
) -> None:
    choice.record(mode, Outcome(tokens, seconds, extra_seconds))


def play(choice: DraftChoice, costs: dict[bool, tuple[float, float]], n: int = ROUNDS) -> dict:
    """Simulate steps of fixed (tokens, seconds) per mode; return the time spent in each."""
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
def test_a_draft_never_overdraws_its_regret_budget(promised: float, steps) -> None:
    """The regret is bounded, whatever a draft promises; a plain pass takes a second.

    Beyond it are the share that time adds, and what the last step overdraws.
    """
    choice = DraftChoice((promised, 1.0), 1.0)
    balance, all_seconds = 0.0, 0.0
    for offered in steps:
        mode = choice.next_uses_draft(0.1)
        tokens, seconds = offered if mode else (1, 1.0)
        note(choice, mode, tokens, seconds)
        balance += tokens - seconds
        all_seconds += seconds
        assert balance > -(2.0 + 0.015 * all_seconds + 3.0)


def budget(choice: DraftChoice) -> float:
    """Return the tokens that trials may still lose."""
    return float(choice.state_dict()["budget"])


def test_a_loss_is_charged_to_the_budget_and_a_gain_added() -> None:
    choice = DraftChoice((3.0, 2.0), 1.0)
    budgets = [budget(choice)]
    for tokens, seconds in ((1, 1.8), (3, 2.0)):
        note(choice, True, tokens, seconds)
        budgets.append(budget(choice))
    assert budgets[0] - budgets[1] == pytest.approx(0.8, abs=0.05)
    assert budgets[2] - budgets[1] == pytest.approx(1.0, abs=0.05)


def test_mode_changes_count_against_the_draft_but_not_as_its_pace() -> None:
    budgets, rates = [], []
    for extra in (0.0, 1.0):
        choice = DraftChoice((3.0, 2.0), 1.0)
        note(choice, True, 1, 1.2, extra)
        budgets.append(budget(choice))
        rates.append(choice.rate)
    assert budgets[0] == pytest.approx(budgets[1] + 1.0, abs=0.02)
    assert rates[0] == rates[1]


def test_a_level_that_takes_more_than_may_be_lost_is_not_tried() -> None:
    choice = DraftChoice((9.0, 1.0), 1.0)
    assert not any(choice.next_uses_draft(2.5) for _ in range(3))


def test_without_a_draft_model_there_is_nothing_to_choose() -> None:
    assert play(DraftChoice(None, 1.0), {False: (1.0, 1.0)}, 100)[True] == 0.0


def test_a_draft_that_was_measured_in_a_bad_hour_is_tried_again() -> None:
    """A step with it seems to cost five tokens until one is run: the time budget pays for one."""
    choice = DraftChoice((6.0, 2.0), 1.0)
    n_steps, costs = 0, 5.0
    while not choice.next_uses_draft(costs):
        note(choice, False, 1, 1.0)
        n_steps += 1
        assert n_steps < 300
    assert n_steps > 100


# --- the exploration budget ----------------------------------------------------------------------


def test_a_draft_comes_back_after_the_machine_stood_still() -> None:
    """The pause may be any time: it takes a few hundred tokens, not thousands."""
    choice = DraftChoice((6.0, 2.0), 1.0)
    note(choice, True, 1, 5000.0)
    n_steps = 0
    while not choice.next_uses_draft(0.1):
        note(choice, False, 1, 1.0)
        n_steps += 1
        assert n_steps < 400


@given(st.integers(2, 500), st.floats(0.0, 1.0))
def test_what_was_won_is_not_risked_once_the_draft_is_worse(n_tokens: int, price: float) -> None:
    choice = DraftChoice((4.0, 2.0), 1.0)
    note(choice, True, n_tokens, 1.0)
    while choice.is_draft_better:
        note(choice, True, 0, 10.0)
    choice.next_uses_draft(price)
    assert budget(choice) <= 2.0


def test_gains_of_n_grams_do_not_count_against_the_draft() -> None:
    """n-grams give nine tokens a pass, until the time budget pays for a trial of the draft."""
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


# --- a draft beside n-grams -----------------------------------------------------------------------


def test_a_useless_draft_is_not_credited_with_tokens_of_n_grams() -> None:
    """n-grams give nine tokens in every pass, the draft none, for a tenth of a pass."""
    choice = DraftChoice((4.0, 1.6), 1.0)
    n_used = 0
    for _ in range(400):
        uses_draft = choice.next_uses_draft(0.1)
        n_used += uses_draft
        seconds = 1.3 + 0.1 * uses_draft
        choice.record(uses_draft, Outcome(10, seconds, ngram_tokens=9, ngram_seconds=0.3))
    assert not choice.is_draft_better
    assert n_used < 100


def test_a_draft_that_adds_tokens_to_those_of_n_grams_stays() -> None:
    """Lucky passages of n-grams, where the draft adds nothing, alternate with others."""
    choice = DraftChoice((4.0, 1.6), 1.0)
    n_used = 0
    for step in range(400):
        uses_draft, is_lucky = choice.next_uses_draft(0.1), step % 20 < 6
        n_used += uses_draft
        ngram_tokens = 9 if is_lucky else 0
        tokens = 10 if is_lucky else (3 if uses_draft else 1)
        choice.record(uses_draft, Outcome(tokens, 1.0 + 0.4 * uses_draft, 0.0, ngram_tokens, 0.0))
    assert n_used > 350
