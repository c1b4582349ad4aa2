"""The memory budget changes during texts, which stay the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget_changes import Changes, grow, smallest_budgets

import specdec
from offload.budget import BudgetExceeded
from offload.storage.direct_io import StorageError
from offload.units import MIB
from specdec.api import LLM, CalledFromInside, ModelClosed
from specdec.checks import ConfigError
from specdec.planning import loaded
from specdec.policy import opportunistic_layers
from specdec.sampling.params import SamplingParams

PROMPT = "def add(a, b):\n    return a"
PROMPTS = [PROMPT, "class Tree:", "import os\n", PROMPT + " + b"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7)
LARGEST, BUDGETS, TIMES = 400, (100, 1500, 16, 400), (5, 13, 20, 28)
"""Budgets in MiB above the smallest, and the numbers of new tokens at which they change."""
SIZES = {"ctx_size": 256, "num_draft_tokens": 8, "parallel": 4}


@pytest.fixture(scope="module", params=["checkpoint", pytest.param("gguf", marks=pytest.mark.gguf)])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A target that streams, and its draft."""
    folder = tmp_path_factory.mktemp("grown")
    if request.param == "checkpoint":
        return grow(folder / "model"), "pair:draft"
    pytest.importorskip("llama_cpp")
    return grow(folder / "model.gguf", "--format", "gguf"), "pair:draft.gguf"


@pytest.fixture(scope="module")
def largest(pair: tuple[Path, str]) -> int:
    return specdec.plan_run(*pair, **SIZES).smallest_budget_bytes + LARGEST * MIB


@pytest.fixture
def llm(pair: tuple[Path, str], largest: int) -> Iterator[LLM]:
    with specdec.load(*pair, memory_budget=largest, **SIZES) as loaded_llm:
        yield loaded_llm


@pytest.fixture
def smallest(llm: LLM) -> int:
    return smallest_budgets(llm)[-1]


def changes_of(llm: LLM, smallest: int) -> Changes:
    return Changes(llm, smallest, BUDGETS, TIMES)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_is_the_same_whatever_the_budgets(
    llm: LLM, smallest: int, params: SamplingParams
) -> None:
    expected = llm.generate(PROMPT, params, logits_processors=[lambda ids, scores: scores])
    before = llm.target
    changes = changes_of(llm, smallest)
    actual = llm.generate(PROMPT, params, cache_prompt=False, logits_processors=[changes])
    changes.finish()
    assert actual.token_ids == expected.token_ids
    budgets = [smallest + more * MIB for more in BUDGETS]
    assert [getattr(plan, "budget_bytes", plan) for plan in changes.outcomes] == budgets
    assert len({id(target) for target in (before, *changes.targets)}) > 1, "loaded again"
    assert llm.plan.budget_bytes == llm.stats.memory_budget_bytes == budgets[-1]
    assert sum(n for _, n in llm.plan.parts) == budgets[-1]
    assert actual.stats.bytes_streamed > 0
    assert llm.stats.bytes_streamed >= actual.stats.bytes_streamed + expected.stats.bytes_streamed


@pytest.mark.slow_except(1)
def test_sequences_that_share_passes_go_on(llm: LLM, smallest: int) -> None:
    expected = [llm.generate(prompt, SAMPLED).token_ids for prompt in PROMPTS[1:]]
    several = SAMPLED.replace(n=2)
    alone = llm.generate(PROMPT, several).outputs
    changes = changes_of(llm, smallest)
    streams = [llm.stream(prompt, SAMPLED) for prompt in PROMPTS[1:]]
    streams.append(llm.stream(PROMPT, several, logits_processors=[changes]))
    for stream in streams:
        stream.start(streams_output=False)
    for stream in streams:
        for _ in stream:
            pass
    changes.finish()
    assert not [error for error in changes.outcomes if isinstance(error, Exception)]
    assert [stream.result.token_ids for stream in streams[:-1]] == expected
    actual = streams[-1].result.outputs
    assert [x.token_ids for x in actual] == [x.token_ids for x in alone]
    assert llm.stats.preempted > 0
    assert llm.session.engine.scheduler.kv.files.n_bytes == 0


@pytest.mark.slow_except(1)
def test_a_refused_budget_changes_nothing(llm: LLM) -> None:
    plan, target = llm.plan, llm.target
    expected = llm.generate(PROMPT, GREEDY).token_ids
    with pytest.raises(BudgetExceeded, match="the smallest budget that works is .* MiB"):
        llm.set_memory_budget("100MiB")
    with pytest.raises(ConfigError, match="is above the limit of this process"):
        llm.set_memory_budget("1000000GiB")
    with pytest.raises(ConfigError, match="has no unit"):
        llm.set_memory_budget("3.5")
    assert (llm.plan, llm.target) == (plan, target)
    assert llm.generate(PROMPT, GREEDY, cache_prompt=False).token_ids == expected


@pytest.mark.slow_except(1)
def test_a_change_that_the_loaded_parts_fit_loads_nothing(llm: LLM) -> None:
    target, budget = llm.target, llm.plan.budget_bytes
    plan = llm.set_memory_budget(budget + 4 * MIB)
    assert llm.target is target
    assert plan.budget_bytes == budget + 4 * MIB
    assert plan.placement == llm.plan.placement
    assert plan.to_dict()["memory"]["available"] >= 4 * MIB
    assert llm.set_memory_budget(budget).budget_bytes == budget
    assert llm.target is target


def test_opportunistic_layers_stay_until_a_smaller_budget_needs_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory that other tests of this process left would leave none for layers.
    monkeypatch.setattr(opportunistic_layers, "recent_peak_rss", lambda: 300 * MIB)
    model = grow(tmp_path / "model")
    smallest = specdec.plan_run(model, "pair:draft", **SIZES).smallest_budget_bytes
    with specdec.load(model, "pair:draft", memory_budget=smallest + 250 * MIB, **SIZES) as llm:
        pinned: list[int] = []
        change, target = llm.session.change_budget, llm.target

        def note(total_bytes: int, source: str) -> None:
            pinned.append(target.pinned_bytes)
            try:
                change(total_bytes, source)
            finally:
                pinned.append(target.pinned_bytes)

        llm.session.change_budget = note  # type: ignore[method-assign]
        llm.generate(PROMPT, GREEDY)
        budget = llm.plan.budget_bytes
        with pytest.raises(BudgetExceeded):
            llm.set_memory_budget("100MiB")
        llm.set_memory_budget(budget + 4 * MIB)
        llm.set_memory_budget(budget)
        assert llm.target is target, "not loaded again"
        before = pinned[0]
        assert before > 0
        assert pinned[:5] == [before] * 5
        assert 0 < pinned[5] < before


@pytest.mark.slow_except(1)
def test_a_change_from_inside_of_a_step_is_refused(llm: LLM) -> None:
    def change(ids: Any, scores: Any) -> Any:
        llm.set_memory_budget("auto")
        return scores

    with pytest.raises(CalledFromInside):
        llm.generate(PROMPT, GREEDY, logits_processors=[change])


def failing(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    load, failures = loaded.load_target, [StorageError("gone")] * num_failures

    def load_target(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(*arguments)

    monkeypatch.setattr(loaded, "load_target", load_target)


@pytest.mark.slow_except(1)
def test_a_text_goes_on_if_the_new_plan_cannot_be_loaded(
    llm: LLM, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plan = llm.generate(PROMPT, GREEDY).token_ids, llm.plan
    failing(monkeypatch, 1)
    changes = Changes(llm, smallest, [16], [8])
    actual = llm.generate(PROMPT, GREEDY, logits_processors=[changes])
    changes.finish()
    assert [str(error) for error in changes.outcomes] == ["gone"]
    assert (actual.token_ids, llm.plan) == (expected, plan)


@pytest.mark.slow_except(1)
def test_a_session_ends_if_no_plan_can_be_loaded_any_more(
    llm: LLM, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 2)
    changes = Changes(llm, smallest, [16], [8])
    with pytest.raises(StorageError, match="gone"):
        llm.generate(PROMPT, GREEDY, logits_processors=[changes])
    changes.finish()
    with pytest.raises(ModelClosed):
        llm.generate(PROMPT, GREEDY)
    assert llm.stats.generated_tokens > 0


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    "more",
    [
        {"spec": {"acceptance": "block", "tree_width": 1}, "temperature": 0.8},
        {"regex": "[a-z ]{40,200}", "ignore_eos": False},
        {"num_beams": 3},
        {"spec": {"spec_type": "ngram"}},
    ],
    ids=["block", "regex", "beams", "ngram"],
)
def test_all_kinds_of_generations_go_on(
    pair: tuple[Path, str], largest: int, more: dict[str, Any]
) -> None:
    options = dict(more)
    spec = options.pop("spec", {})
    with specdec.load(*pair, memory_budget=largest, **SIZES, num_beams=3, **spec) as llm:
        params = GREEDY.replace(seed=5, **options)
        expected = llm.generate(PROMPT, params).token_ids
        changes = Changes(llm, smallest_budgets(llm)[-1], (60, LARGEST), (5, 15))
        actual = llm.generate(PROMPT, params, logits_processors=[changes])
        changes.finish()
        errors = [error for error in changes.outcomes if isinstance(error, Exception)]
        assert not errors
        if "acceptance" in spec:  # its noise is drawn in the order of steps
            assert len(actual.token_ids) == GREEDY.max_tokens
        else:
            assert actual.token_ids == expected


@pytest.mark.slow_except(1)
def test_a_draft_leaves_and_comes_back(pair: tuple[Path, str]) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_draft_tokens"}
    plan = specdec.plan_run(*pair, **sizes)
    with_draft = plan.smallest_budget_bytes + 40 * MIB
    with specdec.load(*pair, memory_budget=with_draft, **sizes) as llm:
        assert llm.draft is not None
        expected = llm.generate(PROMPT, SAMPLED).token_ids
        smallest, smallest_with_draft = smallest_budgets(llm)
        more_mib = (smallest_with_draft - smallest) // MIB + 24
        changes = Changes(llm, smallest, (0, more_mib), (5, 15))
        actual = llm.generate(PROMPT, SAMPLED, logits_processors=[changes])
        changes.finish()
        without, again = changes.outcomes
        assert isinstance(without, specdec.RunPlan)
        assert isinstance(again, specdec.RunPlan)
        assert (without.draft_placement, again.draft_placement is None) == (None, False)
        assert llm.draft is not None
        assert actual.token_ids == expected
