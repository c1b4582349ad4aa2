"""GGUF models through the public API: streamed, speculative, mixed with checkpoints, torch-free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from offload.units import MIB
from specdec.config import SamplingParams

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf

ROOT = Path(specdec.__file__).resolve().parent.parent
PROMPT = "def add(a, b):\n    return a"
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)
GREEDY = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """440 MB of float32, whose rounding is small enough for equal texts to be demanded."""
    from bench.cli import main

    path = tmp_path_factory.mktemp("grown") / "model.gguf"
    argv = ["synth", "--size", "440MB", "--vocab-size", "4096", "-o", str(path)]
    assert main([*argv, "--format", "gguf", "--dtype", "fp32"]) == 0
    return path


def ids(model: str | Path, draft: str | None, sampling: SamplingParams, **options: object):
    with specdec.load(model, draft, ctx_size=256, **options) as llm:
        return llm.generate(PROMPT, sampling).token_ids


@pytest.fixture(scope="module")
def plain(grown: Path) -> dict[SamplingParams, tuple[int, ...]]:
    """What the target says by itself, mapped from its file."""
    return {s: ids(grown, None, s, load_mode="mmap", spec_type="none") for s in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["pair:draft.gguf", "pair:draft", None])
def test_no_draft_changes_the_output(grown, plain, draft, sampling):
    assert ids(grown, draft, sampling) == plain[sampling]


@pytest.mark.parametrize("more_mib", [0, 40])
def test_a_streamed_target_says_the_same_within_its_budget(grown, plain, more_mib):
    options = {"ctx_size": 256, "num_draft_tokens": 12}
    plan = specdec.plan_run(grown, "pair:draft.gguf", **options)
    budget = plan.smallest_budget_bytes + more_mib * MIB
    with specdec.load(grown, "pair:draft.gguf", memory_budget=budget, **options) as llm:
        assert llm.plan.residency.n_streamed_layers > 0
        for sampling in (GREEDY, SAMPLED):
            result = llm.generate(PROMPT, sampling)
            assert result.token_ids == plain[sampling]
            assert result.stats.bytes_streamed > 0
            assert result.stats.mean_acceptance_length > 1.5


def test_a_checkpoint_with_a_gguf_draft():
    alone = ids("pair:target", None, GREEDY, spec_type="none")
    assert ids("pair:target", "pair:draft.gguf", GREEDY) == alone


def test_formats_of_one_model_have_one_vocabulary():
    from specdec.formats import compare_models

    result = compare_models("pair:target.gguf", "pair:draft")
    assert result.problem is None
    assert result.n_equal == result.n_target_tokens == result.n_draft_tokens


def test_a_quantised_cache_takes_less_of_the_budget(grown):
    def cache_bytes(**options: object) -> int:
        return dict(specdec.plan_run(grown, ctx_size=2048, **options).parts)["target KV cache"]

    # Blocks of 32 numbers in 34 bytes instead of 64.
    assert cache_bytes(cache_type_k="q8_0", cache_type_v="q8_0") == cache_bytes() * 34 // 64
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    assert len(ids(grown, None, sampling, cache_type_k="q8_0", cache_type_v="q8_0")) == 32


def test_cache_types_are_for_gguf():
    with pytest.raises(specdec.SpecdecError, match="cache types are for GGUF models"):
        specdec.plan_run("pair:target", cache_type_k="q8_0")


def test_a_tree_wider_than_llama_cpp_can_follow_is_refused(grown):
    with pytest.raises(specdec.SpecdecError, match="at most 255"):
        specdec.plan_run(grown, num_draft_tokens=300)


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
