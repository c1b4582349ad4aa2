"""A text that outgrows the context: the target sees the sinks and a window of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_tiny_checkpoint
from gguf_models import save_tiny_gguf
from tiny_pair import save_model, save_tokenizer

import specdec
from offload.units import MIB
from specdec.checks import ConfigError
from specdec.sampling.context_window import N_SINKS, ContextWindow

CONTEXT = 40
PROMPT = list(b"def f(x):")
SHIFTED: dict[str, Any] = {"ctx_size": CONTEXT, "context_shift": True}
LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True}
DRAFTING: list[dict[str, Any]] = [
    {},
    {"num_draft_tokens": 8, "draft_depth": 4, "spec_type": "draft"},
    {"num_draft_tokens": 24, "draft_depth": 12, "tree_width": 2},
    {"num_draft_tokens": 8, "draft_depth": 4, "draft_window": 16},
    {"spec_type": "ngram", "num_draft_tokens": 8},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("draft"), seed=0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    save_tiny_checkpoint("qwen3.5", directory, vocab_size=259, max_position_embeddings=2048)
    save_tokenizer(directory)
    return directory


def visible(token_ids: Sequence[int]) -> list[int]:
    """The sinks, and at most CONTEXT - 5 tokens that begin at a multiple of half as many."""
    n_recent = CONTEXT - 5
    if len(token_ids) < CONTEXT:
        return list(token_ids)
    start = next(
        i for i in range(0, len(token_ids), n_recent // 2) if len(token_ids) - i <= n_recent
    )
    return [*token_ids[:4], *token_ids[start:]]


def test_the_text_is_the_models_own_with_each_view(target: Path) -> None:
    """transformers computes each token from the sinks and the window, without any cache."""
    import torch
    from transformers import AutoModelForCausalLM

    with specdec.load(target, **SHIFTED) as llm:
        result = llm.generate(PROMPT, **LONG)
    assert (len(result.token_ids), result.outputs[0].finish_reason) == (90, "length")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    token_ids = list(PROMPT)
    for token in result.token_ids:
        with torch.no_grad():
            row = model(torch.tensor([visible(token_ids)])).logits[0, -1]
        assert row[token] >= row.max() - 1e-4
        token_ids.append(token)


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "T"])
@pytest.mark.parametrize("drafting", DRAFTING)
def test_drafts_leave_the_text_alone(
    target: Path, draft: Path, drafting: dict[str, Any], sampling: dict[str, Any]
) -> None:
    name = None if drafting.get("spec_type") == "ngram" else draft
    with specdec.load(target, name, **SHIFTED, **drafting) as llm:
        plain = llm.generate(PROMPT, speculative=False, **LONG, **sampling)
        result = llm.generate(PROMPT, cache_prompt=False, **LONG, **sampling)
        assert llm.target.max_context == CONTEXT
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted_tokens > 0 or not drafting


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2, "n": 2, "temperature": 0.9, "seed": 3, "repetition_penalty": 1.2},
        {"regex": "(abcdefgh){10}", "ignore_eos": False},
        {"regex": "[ab]{60,80}!", "ignore_eos": False, "temperature": 0.9, "seed": 1},
        {"prompt_logprobs": 1, "no_repeat_ngram_size": 3},
    ],
)
def test_options_of_a_request(target: Path, draft: Path, asked: dict[str, Any]) -> None:
    """With the prefix cache and without; stop strings before, at and after the jumps."""
    with specdec.load(target, draft, num_draft_tokens=8, parallel=2, **SHIFTED) as llm:
        plain = llm.generate(PROMPT, speculative=False, **{**LONG, **asked})
        assert len(plain.token_ids) > CONTEXT
        for caches in (False, True, True):
            result = llm.generate(PROMPT, cache_prompt=caches, **{**LONG, **asked})
            for actual, expected in zip(result.outputs, plain.outputs, strict=True):
                assert actual.token_ids == expected.token_ids
                assert actual.top_logprobs == expected.top_logprobs
                assert actual.finish_reason == expected.finish_reason
            assert result.prompt_logprobs == plain.prompt_logprobs
        for at in (20, CONTEXT - len(PROMPT) - 1, CONTEXT, 55):
            more = {**LONG, **asked, "stop": [plain.text[at : at + 3]]}
            stopped = llm.generate(PROMPT, speculative=False, **more)
            assert llm.generate(PROMPT, cache_prompt=False, **more).text == stopped.text


@pytest.mark.parametrize("num_prompt", [1, CONTEXT - 2, CONTEXT - 1])
def test_prompts_of_any_length_that_fits(target: Path, draft: Path, num_prompt: int) -> None:
    prompt = [5 + i * i % 90 for i in range(num_prompt)]
    with specdec.load(target, draft, num_draft_tokens=8, **SHIFTED) as llm:
        plain = llm.generate(prompt, speculative=False, **LONG)
        assert llm.generate(prompt, cache_prompt=False, **LONG).token_ids == plain.token_ids


@pytest.mark.slow
def test_sequences_that_share_passes_and_are_preempted(target: Path, draft: Path) -> None:
    prompts = [[5 + (i * step) % 90 for i in range(8 + step)] for step in range(1, 7)]
    with specdec.load(target, draft, num_draft_tokens=6, **SHIFTED) as llm:
        alone = [llm.generate(prompt, **LONG).token_ids for prompt in prompts]
    with specdec.load(
        target, draft, num_draft_tokens=6, parallel=4, kv_tokens=128, **SHIFTED
    ) as llm:
        results = llm.generate(prompts, **LONG)
    assert [result.token_ids for result in results] == alone


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "T"])
def test_recurrent_layers(hybrid: Path, draft: Path, sampling: dict[str, Any]) -> None:
    with specdec.load(hybrid, draft, num_draft_tokens=8, draft_depth=4, **SHIFTED) as llm:
        plain = llm.generate(PROMPT, speculative=False, **LONG, **sampling)
        result = llm.generate(PROMPT, cache_prompt=False, **LONG, **sampling)
    assert result.token_ids == plain.token_ids


def test_the_models_own_head(hybrid: Path) -> None:
    with specdec.load("pair:hybrid", "mtp", num_draft_tokens=8, draft_depth=4, **SHIFTED) as llm:
        plain = llm.generate("def f(x):", speculative=False, **LONG)
        result = llm.generate("def f(x):", cache_prompt=False, **LONG)
        before = llm.generate("def f(x):", max_tokens=20, ignore_eos=True).stats.accepted_tokens
    assert result.token_ids == plain.token_ids
    assert result.stats.accepted_tokens > 2 * before, "it drafts after the window has jumped"


@pytest.mark.slow
def test_kv_on_storage(draft: Path, tmp_path: Path) -> None:
    """The window jumps in blocks that are in the file."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = save_model(tmp_path / "model", seed=0, num_hidden_layers=8, **heads)
    options = {"ctx_size": 1536, "context_shift": True, "num_draft_tokens": 8, "exact": "on"}
    options |= {"parallel": 2, "kv_tokens": 3072}
    prompts = [[5 + (i * step + i * i) % 85 for i in range(n)] for step, n in ((7, 1500), (3, 300))]
    asked = {**LONG, "n": 2, "temperature": 0.8, "seed": 2, "logprobs": True}
    with specdec.load(model, spec_type="none", **options) as llm:
        expected = [llm.generate(prompt, **asked) for prompt in prompts]
    budget = specdec.plan_run(model, draft, **options).smallest_budget_bytes + 4 * MIB
    with specdec.load(model, draft, memory_budget=budget, **options) as llm:
        assert llm.plan.kv_split is not None
        results = llm.generate(prompts, **asked)
        assert llm.stats.kv_bytes_read > 0
    for result, whole in zip(results, expected, strict=True):
        for actual, output in zip(result.outputs, whole.outputs, strict=True):
            assert (actual.token_ids, actual.logprobs) == (output.token_ids, output.logprobs)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gguf(tmp_path: Path, family: str) -> None:
    path = save_tiny_gguf(family, tmp_path / "target.gguf")
    prompt = [5 + i * i % 80 for i in range(9)]
    with specdec.load(path, num_draft_tokens=6, spec_type="ngram", **SHIFTED) as llm:
        plain = llm.generate(prompt, speculative=False, **LONG)
        result = llm.generate(prompt, cache_prompt=False, **LONG)
    assert len(plain.token_ids) == 90
    assert result.token_ids == plain.token_ids


def test_without_it_the_text_ends_where_the_context_is_full(target: Path, caplog: Any) -> None:
    with specdec.load(target, ctx_size=CONTEXT) as llm:
        result = llm.generate(PROMPT, **LONG)
    assert len(result.token_ids) == CONTEXT - len(PROMPT)
    with specdec.load(target, **SHIFTED) as llm:
        assert not caplog.text
        shifted = llm.generate(PROMPT, **LONG)
    assert shifted.token_ids[: len(result.token_ids)] == result.token_ids
    assert (
        "the context of 40 tokens is full: from here on the target sees the first 4" in caplog.text
    )
    assert caplog.text.count("is full") == 1


def test_too_small_a_context(target: Path) -> None:
    with pytest.raises(ConfigError, match="ctx_size is 8, must be at least 16 with context_shift"):
        specdec.load(target, ctx_size=8, context_shift=True)


@pytest.mark.parametrize("max_context", [16, 17, 40, 2048])
def test_the_window_of_a_target(max_context: int) -> None:
    window = ContextWindow.of_target(max_context)
    n_tokens = 1
    while n_tokens < 3 * max_context:
        n_hidden, n_more = window.n_hidden(n_tokens), window.n_before_jump(n_tokens)
        assert n_more is not None
        assert n_more > 0
        assert n_tokens - n_hidden < max_context
        assert n_tokens + n_more - 1 - n_hidden < max_context, "the last one before the jump"
        assert window.n_hidden(n_tokens + n_more - 1) == n_hidden
        assert window.n_hidden(n_tokens + n_more) > n_hidden
        assert len(window.view(range(n_tokens))) == n_tokens - n_hidden
        assert window.view(range(n_tokens))[:N_SINKS] == list(range(min(n_tokens, N_SINKS)))
        n_tokens += n_more
