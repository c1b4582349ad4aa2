from __future__ import annotations

import json

import pytest

from specdec.metrics.recorder import StatsRecorder
from specdec.metrics.stats import GenerationStats, MeasuredPass, percentile
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

CONTRACT = {
    "tokens_per_second", "time_to_first_token", "time_per_output_token", "generated_tokens",
    "passes", "mean_acceptance_length", "acceptance_rate", "bytes_streamed", "stall_seconds",
    "draft_seconds", "peak_memory_bytes", "memory_budget_bytes", "kv_bytes", "kv_used_fraction",
    "kv_shared_bytes", "state_bytes", "flops_rejected_fraction", "pass_seconds", "ngram_hits",
    "time_per_output_token_p90",
    "draft_ahead_hits", "draft_ahead_misses", "overlapped_draft_seconds", "pass_slowdown",
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def chain(n: int, source: str = "draft") -> DraftTree:
    tree, node = DraftTree(0), 0
    for token in range(1, n + 1):
        node = tree.add(node, token, -0.1, source)
    return tree


def recorded() -> GenerationStats:
    """Prefill of 2 s; steps of 4, 1 and 3 tokens that take 1 s, 1 s and 2 s."""
    clock = Clock()
    recorder = StatsRecorder(prompt_tokens=5, clock=clock)
    clock.now += 2.0
    recorder.record_first_token()
    for tree, path, seconds in (
        (chain(3), (0, 1, 2, 3), 1.0),
        (chain(4, "ngram"), (0,), 1.0),
        (chain(3, "ngram"), (0, 1, 2), 2.0),
    ):
        with recorder.drafting():
            clock.now += 0.25 * seconds
        with recorder.verifying():
            clock.now += 0.75 * seconds
        recorder.record_step(tree, Acceptance(path, 9, is_bonus=len(path) == len(tree)))
    return recorder.stats()


def test_metrics_of_a_generation() -> None:
    stats = recorded()
    assert stats.generated_tokens == 1 + 4 + 1 + 3
    assert stats.passes == 3
    assert stats.drafted_tokens == 10
    assert stats.accepted_tokens == 5
    assert stats.ngram_hits == 2
    assert stats.bonus_tokens == 1
    assert stats.time_to_first_token == pytest.approx(2.0)
    assert stats.decode_seconds == pytest.approx(4.0)
    assert stats.tokens_per_second == pytest.approx(8 / 4)
    assert stats.time_per_output_token == pytest.approx(0.5)
    assert stats.time_per_output_token_p90 == pytest.approx(1.0)  # 4 × 1/4, 1, 3 × 2/3
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.acceptance_rate == pytest.approx(0.5)
    assert stats.flops_rejected_fraction == pytest.approx(5 / 13)
    assert stats.draft_seconds == pytest.approx(1.0)
    assert stats.pass_seconds == pytest.approx(3.0)


def test_acceptance_by_depth() -> None:
    """Steps: all three right; the first wrong; two right and the third wrong."""
    stats = recorded()
    assert stats.tried_by_depth == (3, 2, 2)
    assert stats.accepted_by_depth == (2, 2, 1)


def test_a_guess_beyond_the_length_is_not_wrong() -> None:
    recorder = StatsRecorder()
    recorder.record_step(chain(3), Acceptance((0, 1), next_token=2, is_bonus=False))
    assert recorder.stats().tried_by_depth == (1,)


def run_pass(recorder: StatsRecorder, clock: Clock, seconds: float, num_tokens: int = 4) -> None:
    with recorder.verifying(num_tokens):
        clock.now += seconds
    recorder.record_outcome(was_ahead=True)  # without parallel drafting: neither hit nor miss


def run_pass_beside(
    recorder: StatsRecorder,
    clock: Clock,
    seconds: float,
    draft_seconds: float,
    *,
    num_tokens: int = 4,
    is_hit: bool = True,
) -> None:
    """Start drafting half a second into the pass."""
    began = clock.now
    with recorder.verifying(num_tokens, is_drafting_ahead=True):
        clock.now += seconds
    clock.now = began + 0.5
    with recorder.drafting_ahead():
        clock.now += draft_seconds
    clock.now = max(clock.now, began + seconds)
    recorder.record_outcome(was_ahead=is_hit)


def test_drafting_ahead() -> None:
    clock = Clock()
    recorder = StatsRecorder(clock=clock)
    with recorder.drafting():
        clock.now += 0.125
    run_pass_beside(recorder, clock, 2.0, 1.0)
    run_pass_beside(recorder, clock, 2.0, 3.0, is_hit=False)  # continues after the pass
    run_pass(recorder, clock, 2.0)
    stats = recorder.stats()
    assert (stats.draft_ahead_hits, stats.draft_ahead_misses) == (1, 1)
    assert stats.overlapped_draft_seconds == pytest.approx(1.0 + 1.5)
    assert stats.draft_seconds == pytest.approx(0.125 + 1.0 + 3.0)
    assert stats.pass_seconds == pytest.approx(6.0)


def test_slowdown_compares_passes_of_the_same_size() -> None:
    clock = Clock()
    recorder = StatsRecorder(clock=clock)
    run_pass(recorder, clock, 1.0)
    run_pass(recorder, clock, 3.0)
    run_pass_beside(recorder, clock, 2.5, 1.0)
    run_pass_beside(recorder, clock, 3.5, 1.0)
    run_pass(recorder, clock, 1.0, num_tokens=9)
    run_pass_beside(recorder, clock, 2.0, 1.0, num_tokens=9)
    run_pass_beside(recorder, clock, 99.0, 1.0, num_tokens=5)  # never measured alone
    run_pass(recorder, clock, 99.0, num_tokens=6)
    stats = recorder.stats()
    assert stats.slowed_pass_seconds == pytest.approx(2.5 + 3.5 + 2.0)
    assert stats.unslowed_pass_seconds == pytest.approx(2.0 + 2.0 + 1.0)
    assert stats.pass_slowdown == pytest.approx(8.0 / 5.0)


@pytest.mark.parametrize("is_beside", [False, True])
def test_slowdown_is_0_where_it_is_unknown(is_beside: bool) -> None:
    clock = Clock()
    recorder = StatsRecorder(clock=clock)
    if is_beside:
        run_pass_beside(recorder, clock, 2.0, 1.0)
    else:
        run_pass(recorder, clock, 2.0)
    assert recorder.stats().pass_slowdown == 0.0


def test_every_token_after_the_first_comes_from_a_pass() -> None:
    """Except for a cut step: generated − 1 = passes × mean acceptance length."""
    stats = recorded()
    assert stats.generated_tokens - 1 == pytest.approx(stats.passes * stats.mean_acceptance_length)


def test_dictionary_is_plain_and_complete() -> None:
    values = recorded().to_dict()
    assert values["generated_tokens"] == 9
    assert set(values) >= CONTRACT
    assert json.loads(json.dumps(values)) == values


def test_nothing_generated_divides_by_nothing() -> None:
    for stats in (GenerationStats(), StatsRecorder().stats()):
        values = stats.to_dict()
        assert values["tokens_per_second"] == 0.0
        assert values["mean_acceptance_length"] == 1.0
        assert values["flops_rejected_fraction"] == 0.0
        assert values["time_to_first_token"] == 0.0


def test_only_the_first_token() -> None:
    recorder = StatsRecorder(prompt_tokens=3)
    recorder.record_first_token()
    stats = recorder.stats()
    assert stats.generated_tokens == 1
    assert stats.tokens_per_second == 0.0
    assert stats.decode_seconds == 0.0


def test_a_step_cut_by_a_stop_string() -> None:
    recorder = StatsRecorder()
    recorder.record_first_token()
    recorder.record_step(chain(3), Acceptance((0, 1, 2, 3), 9, is_bonus=True), n_emitted=2)
    stats = recorder.stats()
    assert stats.generated_tokens == 3
    assert stats.accepted_tokens == 2  # text cut off by a stop string never reached the caller
    assert stats.bonus_tokens == 0


def test_a_pass_that_fails_took_its_time() -> None:
    clock = Clock()
    recorder = StatsRecorder(clock=clock)

    def fail() -> None:
        with recorder.verifying():
            clock.now += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    stats = recorder.stats()
    assert (stats.draft_seconds, stats.pass_seconds) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([], 0.9, 0.0), ([3.0], 0.9, 3.0), (list(range(1, 11)), 0.9, 9), ([2, 1], 0.5, 1),
     (list(range(1, 12)), 0.9, 10), ([1, 2], 0.0, 1)],
)  # fmt: skip
def test_percentile_is_the_nearest_rank(values: list, fraction: float, expected: float) -> None:
    assert percentile(values, fraction) == expected


def test_times_of_passes_in_order_beside_the_plain_metrics() -> None:
    clock = Clock()
    recorder = StatsRecorder(clock=clock)
    run_pass(recorder, clock, 1.0)
    run_pass_beside(recorder, clock, 2.5, 1.0, num_tokens=9)
    stats = recorder.stats()
    assert stats.pass_times == (MeasuredPass(4, 1.0), MeasuredPass(9, 2.5, is_drafting_ahead=True))
    assert "pass_times" not in stats.to_dict()  # one for each pass: too many to show
