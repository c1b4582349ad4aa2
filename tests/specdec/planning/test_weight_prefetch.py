"""The next start prefetches the last one's resident weights while libraries are imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_pair import save_model

from offload.ring.weight_prefetch import WeightPrefetch, Weights, WeightSelection
from offload.units import MIB
from specdec.api import load
from specdec.engine.session import Session
from specdec.planning import weight_prefetch
from specdec.planning.plan import plan_run
from specdec.run_options import RunOptions


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    return save_model(tmp_path_factory.mktemp("early") / "target", seed=2, **sizes)


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "target")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each start used the prefetched weights."""
    actual: list[bool] = []
    genuine = WeightPrefetch.take

    def take(self: WeightPrefetch, selection: WeightSelection) -> Weights | None:
        weights = genuine(self, selection)
        actual.append(weights is not None)
        return weights

    monkeypatch.setattr(WeightPrefetch, "take", take)
    # In a test process free memory fluctuates more than in a fresh one.
    monkeypatch.setattr(weight_prefetch, "_SAME_BASE_BYTES", 256 * MIB)
    return actual


def text(model: Path, **options: object) -> str:
    with load(model, ctx_size=64, threads=1, **options) as llm:
        return llm.generate("a", max_tokens=8).text


def streaming_budget(model: Path) -> int:
    plan = plan_run(model, ctx_size=64, threads=1)
    return plan.smallest_budget_bytes + 64 * MIB


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("streams", [False, True])
def test_the_second_start_takes_them(
    model: Path, cache: Path, taken: list[bool], streams: bool
) -> None:
    options = {"memory_budget": streaming_budget(model)} if streams else {}
    first = text(model, **options)
    assert taken == []
    assert [text(model, **options) for _ in range(2)] == [first, first]
    assert taken == [True, True]


def test_other_options_have_a_record_of_their_own(
    model: Path, cache: Path, taken: list[bool]
) -> None:
    text(model)
    text(model, spec_type=())
    assert taken == []


def test_a_checkpoint_that_was_replaced_is_read_as_it_is(
    model: Path, tmp_path: Path, cache: Path, taken: list[bool]
) -> None:
    text(model)
    other = save_model(tmp_path / "other", seed=3, hidden_size=256, intermediate_size=1024)
    expected = text(other)
    for path in model.iterdir():
        path.unlink()
    for path in other.iterdir():
        path.rename(model / path.name)
    assert text(model) == expected
    assert taken in ([], [False])


@pytest.mark.slow
def test_a_broken_record_is_no_record(model: Path, cache: Path, taken: list[bool]) -> None:
    first = text(model)
    (record,) = cache.glob("weights-*.json")
    for content in ("", "[]", "{}", '{"layers": 3}', "null"):
        record.write_text(content)
        assert text(model) == first
        assert taken == []
    assert text(model) == first  # rewritten
    assert taken == [True]


def test_less_memory_than_it_took_is_not_filled(
    model: Path, cache: Path, taken: list[bool]
) -> None:
    text(model)
    (record,) = cache.glob("weights-*.json")
    cached = json.loads(record.read_text())
    record.write_text(json.dumps({**cached, "needed_bytes": 1 << 60}))
    text(model)
    assert taken == []


def test_an_error_gives_it_back(model: Path, cache: Path, taken: list[bool]) -> None:
    text(model)

    def fail(_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Session(RunOptions(model, ctx_size=64, threads=1), None, fail)
    assert taken == []
