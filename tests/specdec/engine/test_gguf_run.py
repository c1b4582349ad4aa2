"""GGUF models through the public API: streamed, speculative, mixed with checkpoints, torch-free."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf

import specdec
from offload.budget import BudgetExceeded
from offload.units import KIB, MIB
from specdec.analysis.analyze import analyze
from specdec.sampling.params import SamplingParams

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf

ROOT = Path(specdec.__file__).resolve().parent.parent
PROMPT = "def add(a, b):\n    return a"
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)
GREEDY = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 440 MB of float32 weights."""
    from bench.commands.app import main

    path = tmp_path_factory.mktemp("grown") / "model.gguf"
    argv = ["synth", "--size", "440MB", "--vocab-size", "4096", "-o", str(path)]
    assert main([*argv, "--format", "gguf", "--dtype", "fp32"]) == 0
    return path


def ids(model: str | Path, draft: str | None, *samplings: SamplingParams, **options: object):
    with specdec.load(model, draft, ctx_size=256, **options) as llm:
        return [llm.generate(PROMPT, sampling).token_ids for sampling in samplings]


@pytest.fixture(scope="module")
def plain(grown: Path) -> dict[SamplingParams, tuple[int, ...]]:
    """The target's own output, mapped from its file."""
    sequences = ids(grown, None, GREEDY, SAMPLED, load_mode="mmap", spec_type="none")
    return dict(zip((GREEDY, SAMPLED), sequences, strict=True))


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("draft", ["pair:draft.gguf", "pair:draft", None])
def test_no_draft_changes_the_output(grown, plain, draft):
    assert ids(grown, draft, GREEDY, SAMPLED) == [plain[GREEDY], plain[SAMPLED]]


@pytest.mark.slow
@pytest.mark.parametrize("more_mib", [0, 40])
def test_a_streamed_target_says_the_same_within_its_budget(grown, plain, more_mib):
    options = {"ctx_size": 256, "num_draft_tokens": 12}
    plan = specdec.plan_run(grown, "pair:draft.gguf", **options)
    budget = plan.smallest_budget_bytes + more_mib * MIB
    with specdec.load(grown, "pair:draft.gguf", memory_budget=budget, **options) as llm:
        assert llm.plan.placement.n_streamed_layers > 0
        for sampling in (GREEDY, SAMPLED):
            result = llm.generate(PROMPT, sampling)
            assert result.token_ids == plain[sampling]
            assert result.stats.bytes_streamed > 0
            assert result.stats.mean_acceptance_length > 1.5


@pytest.mark.slow
def test_a_draft_that_streams_too_changes_nothing(monkeypatch):
    force_streaming(monkeypatch)
    options = {"ctx_size": 256, "num_draft_tokens": 8, "spec_type": "draft,ngram"}
    with specdec.load("pair:target.gguf", "pair:target.gguf", **options) as llm:
        result = llm.generate(PROMPT, SAMPLED)
        assert result.stats.accepted_tokens > 0
        assert llm.target.transfer_stats.bytes_streamed > 0
        assert llm.draft.transfer_stats.bytes_streamed > 0
        assert result.token_ids == llm.generate(PROMPT, SAMPLED, speculative=False).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "is_mapped"), [("ram", False), ("mmap", True)])
def test_a_load_mode_is_obeyed(grown, plain, mode, is_mapped):
    with specdec.load(grown, ctx_size=256, load_mode=mode, spec_type="none") as llm:
        assert (str(grown) in Path("/proc/self/maps").read_text()) == is_mapped
        assert llm.plan.uses_mmap == is_mapped
        assert llm.generate(PROMPT, GREEDY).token_ids == plain[GREEDY]


def test_a_mixture_of_experts_runs(tmp_path):
    model = save_tiny_gguf("mixtral", tmp_path / "model.gguf")
    with specdec.load(model, ctx_size=64, spec_type="ngram") as llm:
        assert any("12 of 12 experts in memory" in line for line in llm.plan.lines())
        assert len(llm.generate([3, 17, 5], max_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_mixture_without_separate_experts_is_read_whole(tmp_path):
    """Every token uses all experts of such a model."""
    model = save_tiny_gguf("mixtral", tmp_path / "model.gguf", n_experts=2)
    with specdec.load(model, ctx_size=64, spec_type="ngram") as llm:
        (warning,) = llm.plan.warnings
        assert warning.startswith("a mixture of 2 experts: every pass reads all of them")
        assert f"warning: {warning}" in llm.plan.lines()


@pytest.mark.slow
def test_a_checkpoint_with_a_gguf_draft():
    alone = ids("pair:target", None, GREEDY, spec_type="none")
    assert ids("pair:target", "pair:draft.gguf", GREEDY) == alone


def test_formats_of_one_model_have_one_vocabulary():
    from specdec.models.opened import compare_models

    result = compare_models("pair:target.gguf", "pair:draft")
    assert result.problem is None
    assert result.n_equal == result.n_target_tokens == result.n_draft_tokens


@pytest.mark.slow
def test_a_quantised_cache_takes_less_of_the_budget(grown):
    def cache_bytes(**options: object) -> int:
        return dict(specdec.plan_run(grown, ctx_size=2048, **options).parts)["target KV cache"]

    # Blocks of 32 numbers in 34 bytes instead of 64.
    assert cache_bytes(cache_type_k="q8_0", cache_type_v="q8_0") == cache_bytes() * 34 // 64
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    (tokens,) = ids(grown, None, sampling, cache_type_k="q8_0", cache_type_v="q8_0")
    assert len(tokens) == 32


def test_the_backend_has_the_cache_that_was_planned(grown):
    options = {"ctx_size": 512, "cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    with specdec.load(grown, spec_type="none", **options) as llm:
        assert llm.target.kv_bytes == dict(llm.plan.parts)["target KV cache"]


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    ("present", "smaller"), [("f16", ["q8_0", "q4_0"]), ("q8_0", ["q4_0"]), ("q4_0", [])]
)
def test_a_refused_budget_names_the_caches_that_would_do_with_less(
    grown, present, smaller, monkeypatch
):
    # The process's own memory varies by a MiB or two.
    monkeypatch.setattr("specdec.planning.plan.measure_base", lambda *sources: 100 * MIB)
    # The model is small.
    monkeypatch.setattr("specdec.planning.memory.planner._MIN_ADVISED_SAVING_BYTES", 64 * KIB)

    def plan(budget: str, cache_type: str) -> None:
        types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
        specdec.plan_run(grown, memory_budget=budget, ctx_size=2048, **types)

    with pytest.raises(BudgetExceeded) as refused:
        plan("256MiB", present)
    pattern = r"cache_type_k='(\w+)' cache_type_v='(\w+)' it is ([\d.]+ \w+)"
    advice = re.findall(pattern, str(refused.value))
    assert [(k, v) for k, v, _ in advice] == [(name, name) for name in smaller]
    assert "with ctx_size=1024 it is" in str(refused.value)
    for cache_type, _, budget in advice:
        plan(budget.replace(" ", ""), cache_type)  # it is enough


def test_a_cache_type_of_checkpoints_is_refused(grown):
    for call in (specdec.plan_run, analyze):
        with pytest.raises(specdec.SpecdecError, match="of a GGUF model cannot be fp8"):
            call(grown, cache_type_v="fp8")


def test_a_tree_wider_than_llama_cpp_can_follow_is_refused(grown):
    with pytest.raises(specdec.SpecdecError, match="at most 255"):
        specdec.plan_run(grown, num_draft_tokens=300)


@pytest.mark.slow
def test_a_gguf_run_loads_neither_torch_nor_transformers(grown):
    code = f"""
import sys, specdec
with specdec.load({str(grown)!r}, "pair:draft.gguf", ctx_size=256) as llm:
    print(llm.generate("def f():", max_tokens=8, temperature=0.7, top_p=0.9, seed=1).text)
loaded = {{"torch", "transformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
