"""The MTP head of a GGUF target as draft: the target's text, in memory and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from forced_streaming import force_streaming
from tiny_gguf import save_tiny_architecture
from tiny_gguf_kinds import WITH_HEADS

import specdec
from specdec.models.drafts import draft_candidates
from specdec.models.names import MTP_HEAD
from specdec.sampling.params import SamplingParams

pytestmark = pytest.mark.gguf
PROMPT = [3, 17, 5, 3, 17, 5, 8, 21, 3, 17]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5)
OPTIONS: dict[str, Any] = {"ctx_size": 128, "threads": 1}
DRAFTING: dict[str, Any] = {"draft_model": MTP_HEAD, "spec_type": "draft", "num_draft_tokens": 6}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = (*WITH_HEADS, "qwen35")
    return {name: save_tiny_architecture(name, folder / f"{name}.gguf") for name in names}


def exact_option(name: str) -> str:
    return "auto" if name.startswith("deepseek2") else "on"  # which has compressed keys


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", WITH_HEADS)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_text_is_the_targets(
    name: str, is_streamed: bool, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"exact": exact_option(name), **OPTIONS}
    with specdec.load(models[name], spec_type="none", **options) as llm:
        expected = [llm.generate(PROMPT, s).token_ids for s in (GREEDY, SAMPLED)]
    if is_streamed:
        force_streaming(monkeypatch)
    with specdec.load(models[name], tree_width=3, **DRAFTING, **options) as llm:
        for sampling, token_ids in zip((GREEDY, SAMPLED), expected, strict=True):
            result = llm.generate(PROMPT, sampling)
            assert result.token_ids == token_ids
            assert result.stats.drafted_tokens > 0
            assert (result.stats.bytes_streamed > 0) == is_streamed


def test_several_sequences_share_the_heads_passes(models: Any) -> None:
    prompts = [PROMPT, PROMPT[2:], [9, 8, 7]]
    with specdec.load(models["glm4moe-head"], spec_type="none", exact="on", **OPTIONS) as llm:
        expected = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with specdec.load(models["glm4moe-head"], exact="on", **DRAFTING, **OPTIONS) as llm:
        results = dict(llm.generate_each((prompt, GREEDY) for prompt in prompts))
        assert [results[i].token_ids for i in range(len(prompts))] == expected


def test_the_plan_counts_the_head(models: Any) -> None:
    path = models["qwen35-head"]
    alone = dict(specdec.plan_run(path, spec_type="none", **OPTIONS).parts)
    parts = dict(specdec.plan_run(path, **DRAFTING, **OPTIONS).parts)
    assert not any(name.startswith("draft ") for name in alone)
    assert alone["target embeddings and head"] == parts["target embeddings and head"]
    assert parts["draft embeddings and head"] > 200_000  # the layer's 53,760 numbers
    assert parts["draft KV cache"] > 0


def test_auto_takes_the_head(models: Any) -> None:
    assert MTP_HEAD in [item.name for item in draft_candidates(str(models["qwen35-head"]))]
    assert MTP_HEAD not in [item.name for item in draft_candidates(str(models["qwen35"]))]


def test_a_target_without_a_head_is_refused(models: Any) -> None:
    with pytest.raises(specdec.SpecdecError, match="has no MTP head"):
        specdec.load(models["qwen35"], draft_model=MTP_HEAD)
