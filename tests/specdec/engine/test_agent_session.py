"""A session of 30 turns beside 50 short requests, and after a restart: its prefix is reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_session import AgentSession, always_pay, load, wait_for_files
from checkpoints import save_tiny_checkpoint
from gguf_models import save_tiny_gguf
from tiny_gguf import save_tiny_architecture
from tiny_pair import save_model, save_tokenizer

KINDS = (
    "torch",
    "torch with a draft",
    "hybrid",
    pytest.param("gguf", marks=pytest.mark.gguf),
    pytest.param("gguf hybrid", marks=pytest.mark.gguf),
    pytest.param("gguf mamba", marks=pytest.mark.gguf),
)
SMALL = AgentSession(400, num_turns=8, num_short=20), {"ctx_size": 1024}
LARGE = AgentSession(3000, num_turns=30, num_short=50), {"ctx_size": 4608}
_SHARE = 0.95


def save(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model, and options to load it with."""
    options: dict[str, Any] = {"num_draft_tokens": 4, "tree_width": 1}
    if kind == "torch with a draft":
        (folder / "draft").mkdir()
        draft = save_model(folder / "draft", seed=1, num_hidden_layers=1)
        return save(kind[:5], folder)[0], {**options, "draft_model": draft, "tree_width": 2}
    if kind == "torch":
        (folder / "target").mkdir()
        return save_model(folder / "target", seed=0), options
    if kind == "hybrid":
        save_tiny_checkpoint("qwen3.5", folder, vocab_size=259, max_position_embeddings=8192)
        save_tokenizer(folder)
        return folder, options
    pytest.importorskip("llama_cpp")
    if kind == "gguf":
        return save_tiny_gguf("llama", folder / "m.gguf", n_ctx=8192), options
    name = {"gguf hybrid": "qwen35", "gguf mamba": "mamba2"}[kind]
    return save_tiny_architecture(name, folder / "m.gguf", n_ctx=8192), options


def check(kind: str, folder: Path, session: AgentSession, options: dict[str, Any]) -> None:
    model, more = save(kind, folder)
    cache = folder / "cache"
    with load(model, cache, **options, **more) as llm:
        tokens = session.run(llm)
        assert min(session.shares) >= _SHARE
        wait_for_files(llm)
        assert llm.stats.saved_prefixes > 0
        assert llm.stats.loaded_prefixes == 0
    with load(model, None, **options, spec_type="none") as plain:
        assert session.run(plain, cache_prompt=False) == tokens
        last = max(session.results, key=lambda result: len(result.prompt_token_ids))
        prompt = [*last.prompt_token_ids, *last.token_ids, 7, 8, 9]
        expected = plain.generate(prompt, cache_prompt=False, max_tokens=8, logprobs=True)
    with load(model, cache, **options, **more) as llm:
        result = llm.generate(prompt, max_tokens=8, logprobs=True)
        num_before = len(prompt) - 4
        assert result.stats.reused_prompt_tokens >= _SHARE * num_before
        assert llm.stats.loaded_prefixes == 1
        assert llm.stats.loaded_prefix_tokens == result.stats.reused_prompt_tokens
        assert result.token_ids == expected.token_ids
        assert result.logprobs == expected.logprobs  # equal logits, bit for bit


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_beside_short_requests_and_after_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_pay(monkeypatch)
    check(kind, tmp_path, *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_start_of_three_thousand_tokens(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_pay(monkeypatch)
    check(kind, tmp_path, *LARGE)
