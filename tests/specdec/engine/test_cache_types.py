"""Number formats of a checkpoint's KV cache: output is that of plain decoding with the same one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from agent_session import always_pay, files_of, load, prompt
from tiny_pair import save_model

import specdec
from backends.attention.batch import BLOCK_SIZE
from offload.budget import BudgetExceeded
from offload.units import KIB, MIB
from specdec.analysis.analyze import analyze

OPTIONS: dict[str, Any] = {"ctx_size": 512, "num_draft_tokens": 8, "exact": "on"}
ASKED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": True, "seed": 5}
PROMPT = prompt(150, 7)
TYPES = [("q8_0", None), (None, "fp8"), ("q8_0", "q8_0"), ("fp8", "fp8"), ("bf16", "f16")]


def types_of(keys: str | None, values: str | None) -> dict[str, str | None]:
    return {"cache_type_k": keys, "cache_type_v": values}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "target", seed=0), save_model(folder / "draft", seed=1)


@pytest.fixture(scope="module")
def own_type(models: tuple[Path, Path]) -> Any:
    """The result with a cache in the dtype of the weights, float32."""
    with specdec.load(models[0], spec_type="none", **OPTIONS) as llm:
        return llm.generate(PROMPT, **ASKED)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("types", TYPES)
def test_drafts_change_no_bit(
    models: tuple[Path, Path],
    own_type: Any,
    types: tuple[str | None, str | None],
    temperature: float,
) -> None:
    target, draft = models
    asked = {**ASKED, "temperature": temperature}
    options = {**OPTIONS, **types_of(*types)}
    with specdec.load(target, spec_type="none", **options) as llm:
        expected = llm.generate(PROMPT, **asked)
        stats = expected.stats
        assert (stats.cache_type_k, stats.cache_type_v) == tuple(x or "f32" for x in types)
        assert llm.target.kv_bytes <= dict(llm.plan.parts)["target KV cache"]
    assert expected.logprobs != own_type.logprobs
    for other in (draft, target):
        with specdec.load(target, draft_model=other, spec_type="draft", **options) as llm:
            result = llm.generate(PROMPT, **asked)
        assert result.logprobs == expected.logprobs, "to the bit"
        assert result.stats.drafted_tokens > 0


def test_a_plan_counts_the_stored_bytes(models: tuple[Path, Path]) -> None:
    def plan(**types: str | None) -> Any:
        return specdec.plan_run(models[0], ctx_size=2048, kv_tokens=2048, **types)

    def kv_bytes(**types: str | None) -> int:
        return dict(plan(**types).parts)["target KV cache"]

    whole = kv_bytes()  # float32, heads of 8 numbers
    assert kv_bytes(**types_of("fp8", "fp8")) == whole // 4
    assert kv_bytes(**types_of("q8_0", None)) == whole // 2 + whole // 2 * (8 + 2) // 32
    assert plan().to_dict()["cache_type_k"] == "f32"
    lines = plan(**types_of("q8_0", None)).lines()
    assert sum(line.startswith("KV cache: keys in q8_0, values in f32") for line in lines) == 1
    assert not any(line.startswith("KV cache") for line in plan().lines())


def test_a_refused_budget_names_the_cache_that_would_do_with_less(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.planning.plan.measure_base", lambda *sources: 100 * MIB)
    monkeypatch.setattr("specdec.planning.memory.planner._MIN_ADVISED_SAVING_BYTES", 64 * KIB)
    with pytest.raises(BudgetExceeded) as refused:
        specdec.plan_run(models[0], memory_budget="256MiB", ctx_size=2048)
    pattern = r"cache_type_k='q8_0' cache_type_v='q8_0' it is ([\d.]+ \w+)"
    (budget,) = re.findall(pattern, str(refused.value))
    options = {"memory_budget": budget.replace(" ", ""), **types_of("q8_0", "q8_0")}
    specdec.plan_run(models[0], ctx_size=2048, **options)
    with pytest.raises(BudgetExceeded, match=r"^((?!cache_type).)*$"):
        specdec.plan_run(models[0], ctx_size=2048, **{**options, "memory_budget": "256MiB"})


def test_a_cache_type_of_llama_cpp_is_refused(models: tuple[Path, Path]) -> None:
    for call in (specdec.plan_run, analyze):
        with pytest.raises(specdec.SpecdecError, match="checkpoint cannot be q4_0: f16, bf16, fp8"):
            call(models[0], cache_type_k="q4_0")


def test_an_analysis_counts_the_stored_bytes(models: tuple[Path, Path]) -> None:
    whole = analyze(models[0], on="laptop").model.kv_bytes_per_token
    in_fp8 = analyze(models[0], on="laptop", **types_of("fp8", "fp8"))
    assert in_fp8.model.kv_bytes_per_token == whole // 4


@pytest.mark.parametrize("cache_type", ["q8_0", "fp8"])
def test_kv_on_storage_is_that_of_its_type(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    always_pay(monkeypatch)
    types = types_of(cache_type, cache_type)
    with load(models[0], tmp_path, **OPTIONS, **types) as llm:
        expected = llm.generate(PROMPT, **ASKED)
    n_bytes = sum(path.stat().st_size for path in files_of(tmp_path))
    with load(models[0], tmp_path, **OPTIONS) as llm:
        assert llm.generate(PROMPT, **ASKED).stats.reused_prompt_tokens == 0
        block_bytes = llm.target._pool.block_bytes
    assert n_bytes < block_bytes * len(PROMPT) / BLOCK_SIZE
    with load(models[0], tmp_path, **OPTIONS, **types) as llm:
        result = llm.generate(PROMPT, **ASKED)
        assert result.stats.reused_prompt_tokens >= len(PROMPT) - 1
        assert result.logprobs == expected.logprobs, "to the bit"
