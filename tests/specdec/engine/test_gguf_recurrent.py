"""GGUF models with recurrent layers through the public API: drafts, streams, several requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from forced_streaming import force_streaming
from tiny_gguf import save_tiny_architecture

import specdec
from specdec.sampling.params import SamplingParams

pytestmark = pytest.mark.gguf
PROMPT = [3, 17, 5, 3, 17, 5, 8, 21, 3, 17]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5)
OPTIONS: dict[str, Any] = {"ctx_size": 128, "threads": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("llama", "qwen35", "qwen35moe", "mamba2")
    return {name: save_tiny_architecture(name, folder / f"{name}.gguf") for name in names}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    sequences = {}
    for name, path in models.items():
        with specdec.load(path, spec_type="none", **OPTIONS) as llm:
            sequences[name] = [llm.generate(PROMPT, s).token_ids for s in (GREEDY, SAMPLED)]
    return sequences


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    ("target", "draft"),
    [("qwen35", "llama"), ("llama", "qwen35"), ("mamba2", "mamba2"), ("qwen35", "qwen35")],
)
def test_no_draft_changes_the_text(target: str, draft: str, models: Any, plain: Any) -> None:
    """Targets and drafts with recurrent layers; the target as its draft is always accepted."""
    drafting = {"spec_type": "draft", "num_draft_tokens": 5, **OPTIONS}
    with specdec.load(models[target], models[draft], **drafting) as llm:
        for sampling, expected in zip((GREEDY, SAMPLED), plain[target], strict=True):
            result = llm.generate(PROMPT, sampling)
            assert result.token_ids == expected
            assert result.stats.drafted_tokens > 0
            if draft == target:
                assert result.stats.accepted_tokens > 10


def test_a_target_drafts_chains(models: Any) -> None:
    with specdec.load(models["qwen35"], spec_type="ngram", **OPTIONS) as llm:
        assert llm.spec.width == 1
    with specdec.load(models["qwen35"], spec_type="ngram", tree_width=3, **OPTIONS) as llm:
        assert llm.spec.width == 3


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("name", ["qwen35moe", "mamba2"])
def test_streamed_layers_and_experts(
    name: str, models: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    with specdec.load(models[name], spec_type="ngram", num_draft_tokens=5, **OPTIONS) as llm:
        for sampling, expected in zip((GREEDY, SAMPLED), plain[name], strict=True):
            result = llm.generate(PROMPT, sampling)
            assert result.token_ids == expected
            assert result.stats.bytes_streamed > 0


def test_several_requests_at_a_time(models: Any, plain: Any) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT, [*PROMPT, 4]]
    with specdec.load(models["qwen35"], spec_type="none", **OPTIONS) as llm:
        expected = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with specdec.load(
        models["qwen35"], spec_type="ngram", num_draft_tokens=5, parallel=3, **OPTIONS
    ) as llm:
        results = dict(llm.generate_each((prompt, GREEDY) for prompt in prompts))
    assert [results[i].token_ids for i in range(len(prompts))] == expected
    assert expected[0] == plain["qwen35"][0]


def test_a_second_turn_reuses_the_state_of_the_first(models: Any, plain: Any) -> None:
    text = plain["qwen35"][0]
    with specdec.load(models["qwen35"], spec_type="ngram", num_draft_tokens=5, **OPTIONS) as llm:
        llm.generate(PROMPT, GREEDY)
        second = llm.generate([*PROMPT, *text, 9, 4], GREEDY)
        other = llm.generate([*PROMPT, *text[:3], 9, 9, 4], GREEDY)
    assert second.stats.reused_prompt_tokens >= len(PROMPT) + len(text) - 1
    assert other.stats.reused_prompt_tokens in (0, len(PROMPT))
