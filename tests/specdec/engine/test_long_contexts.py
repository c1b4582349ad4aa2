"""A context whose KV does not fit in the budget: the same text, to the bit, from a file."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_session import always_pay, cost_by_tokens, cut_off, prompt
from tiny_pair import save_model

import specdec
from backends.contract.backend import KvFileError
from offload.budget import BudgetExceeded
from offload.storage import scratch_file
from offload.units import MIB, parse_bytes
from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.planning.load import _kv_folder
from specdec.policy.opportunistic_layers import OpportunisticLayers
from specdec.run_options import RunOptions

SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
OPTIONS: dict[str, Any] = {"ctx_size": 2048, "num_draft_tokens": 8, "exact": "on", "parallel": 3}
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": True, "seed": 5}
LONG, OTHER, SHORT = prompt(1700, 7), prompt(900, 8), prompt(90, 9)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_model(folder / "target", seed=0, **SIZES)
    return target, save_model(folder / "draft", seed=1)


@pytest.fixture(scope="module")
def budget(models: tuple[Path, Path]) -> int:
    """A budget in which a few hundred tokens of KV fit."""
    return specdec.plan_run(*models, **OPTIONS).smallest_budget_bytes + 12 * MIB


@pytest.fixture(scope="module")
def llm(models: tuple[Path, Path], budget: int) -> Iterator[LLM]:
    with specdec.load(*models, memory_budget=budget, **OPTIONS) as loaded:
        split = loaded.plan.kv_split
        assert split is not None
        assert 4 * split.hot_tokens < 2 * OPTIONS["ctx_size"]
        yield loaded


@pytest.fixture(scope="module")
def whole(models: tuple[Path, Path]) -> Iterator[LLM]:
    with specdec.load(models[0], spec_type="none", **OPTIONS) as loaded:
        assert loaded.plan.kv_split is None
        yield loaded


def same(first: Any, second: Any) -> bool:
    return bool(first.token_ids == second.token_ids and first.logprobs == second.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_the_kv_is_changes_no_bit(llm: LLM, whole: LLM, temperature: float) -> None:
    asked = {**ASKED, "temperature": temperature}
    result = llm.generate(LONG, **asked)
    assert same(result, whole.generate(LONG, **asked))
    assert result.stats.kv_bytes_read > 0
    assert result.stats.kv_bytes_written > 0
    assert llm.target.kv_bytes <= _kv_bytes(llm)
    turn = [*LONG, *result.token_ids, *SHORT]  # goes on in the prefix cache
    again = llm.generate(turn, **asked)
    assert same(again, whole.generate(turn, **asked))
    assert again.stats.reused_prompt_tokens > len(LONG) // 2


def _kv_bytes(llm: LLM) -> int:
    parts = dict(llm.plan.parts)
    return parts["target KV cache"] + parts["staging of target KV cache"]


def test_sequences_share_passes_and_memory(llm: LLM, whole: LLM) -> None:
    """The last ones have a common prefix; all of them together do not fit in the KV cache."""
    prompts = [prompt(860, 11), SHORT, OTHER, OTHER[:800] + SHORT]
    asked = {**ASKED, "n": 2, "temperature": 0.7}
    first, second = (made.generate(prompts, **asked) for made in (llm, whole))
    for actual, expected in zip(first, second, strict=True):
        pairs = zip(actual.outputs, expected.outputs, strict=True)
        assert all(same(*pair) for pair in pairs)


def test_plan_and_figures_tell_both_streams(llm: LLM) -> None:
    from specdec.cli.output import perf_parts

    text = "\n".join(llm.plan.lines())
    assert "staging of target KV cache" in text
    assert f"of {llm.plan.kv_tokens} tokens in memory, the others in a file" in text
    assert llm.plan.kv_bytes_per_pass > 0
    stats = llm.generate(OTHER, **ASKED).stats
    assert any("GB of KV read, " in part for part in perf_parts(stats.to_dict()))


def test_a_budget_that_was_refused_runs(models: tuple[Path, Path], budget: int) -> None:
    """The smallest budget is far below the KV of the context and the rest."""
    plan = specdec.plan_run(*models, **OPTIONS)
    assert plan.kv_split is None
    reserved = plan.budget_bytes - dict(plan.parts)["available"]
    assert plan.smallest_budget_bytes < reserved - 30 * MIB


def test_a_refusal_advises_no_larger_budget(models: tuple[Path, Path]) -> None:
    """Half of the context in memory may need more than all of it in a file."""
    # A plan counts what this process holds now, which is less than when `budget` was planned
    # if other tests' models were freed since.
    too_small = specdec.plan_run(models[0], **OPTIONS).smallest_budget_bytes - 100 * MIB
    with pytest.raises(BudgetExceeded) as caught:
        specdec.plan_run(models[0], memory_budget=too_small, **OPTIONS)
    smallest, *advised = re.findall(r"(?:works|it) is ([\d.]+ [MG]iB)", str(caught.value))
    assert all(parse_bytes(size) < parse_bytes(smallest) for size in advised)


def test_memory_holds_kv_until_all_of_it_fits(models: tuple[Path, Path], budget: int) -> None:
    sizes = []
    for more_mib in (0, 50, 100, 1000):
        plan = specdec.plan_run(models[0], memory_budget=budget + more_mib * MIB, **OPTIONS)
        sizes.append(plan.kv_tokens if plan.kv_split is None else plan.kv_split.hot_tokens)
        read = plan.kv_bytes_per_pass
        assert (read > 0) == (sizes[-1] < plan.ctx_size)
    assert sizes == sorted(sizes)
    assert sizes[-1] >= OPTIONS["ctx_size"]


def test_a_folder_that_is_memory_is_refused(tmp_path: Path) -> None:
    assert _kv_folder(RunOptions("t", prompt_cache_dir=tmp_path)) == tmp_path
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        message = f"^prompt_cache_dir is {folder}, which is memory"
        with pytest.raises(ConfigError, match=message) as caught:
            _kv_folder(RunOptions("t", prompt_cache_dir=folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("what", "number"),
    [("pread_into", errno.EIO), ("pwrite_from", errno.ENOSPC), ("pwrite_from", errno.EIO)],
)
def test_a_failure_ends_one_request(
    llm: LLM, whole: LLM, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    def fail(*where: Any) -> int:
        raise OSError(number, os.strerror(number))

    llm.session.forget_prompt()
    with monkeypatch.context() as patch:
        patch.setattr(scratch_file, what, fail)
        failing, going_on = llm.stream(LONG, **ASKED), llm.stream(SHORT, **ASKED)
        text = "".join(chunk.text for chunk in going_on)
        with pytest.raises(KvFileError, match=os.strerror(number)) as caught:
            list(failing)
    assert "\n" not in str(caught.value)
    assert text == whole.generate(SHORT, **ASKED).text
    assert same(llm.generate(LONG, **ASKED), whole.generate(LONG, **ASKED))


def test_a_full_disk_fails_only_what_needs_it(
    llm: LLM, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short requests run in memory that cached KV is dropped for, before a failure and after."""

    def fail(*where: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = {**ASKED, "max_tokens": 70}
    llm.session.forget_prompt()
    llm.generate(OTHER, **asked)  # fills the hot blocks, and is cached
    with monkeypatch.context() as patch:
        patch.setattr(scratch_file, "pwrite_from", fail)
        for seed in range(20, 23):
            assert llm.generate(prompt(90, seed), **asked).token_ids
        with pytest.raises(KvFileError, match="No space left on device"):
            llm.generate(LONG, **asked)
        assert not llm.session.engine.scheduler.kv.cache.cached
        for seed in range(30, 33):
            result = llm.generate(prompt(90, seed), **asked)
        assert same(result, whole.generate(prompt(90, 32), **asked))
    assert same(llm.generate(LONG, **asked), whole.generate(LONG, **asked))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_prompt_that_was_cancelled_goes_on(
    models: tuple[Path, Path],
    whole: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_restarted: bool,
) -> None:
    """From the prefix cache, or from the folder with prompts in the next process."""
    always_pay(monkeypatch)
    # Measured, this process has the other tests' models in the budget.
    monkeypatch.setattr(OpportunisticLayers, "free_memory", lambda self, n_bytes: True)
    folder = tmp_path / "cache" if is_restarted else None

    def load() -> LLM:
        budget = specdec.plan_run(*models, **OPTIONS).smallest_budget_bytes + 12 * MIB
        llm = specdec.load(*models, memory_budget=budget, prompt_cache_dir=folder, **OPTIONS)
        assert llm.plan.kv_split is not None
        cost_by_tokens(llm)
        return llm

    llm = load()
    cut_off(llm, monkeypatch, LONG, 300, 4)
    if is_restarted:
        llm.close()
        llm = load()
    with llm:
        result = llm.generate(LONG, **ASKED)
        assert same(result, whole.generate(LONG, **ASKED))
        assert result.stats.reused_prompt_tokens >= 4 * 250
        assert (llm.stats.loaded_prefixes > 0) == is_restarted
        assert result.stats.kv_bytes_read > 0
