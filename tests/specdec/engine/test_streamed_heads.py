"""Every kind of head beside a target that is streamed: the target's text in every bit, as trees and
as chains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assistant_heads import save_assistant
from checkpoints import save_tiny_checkpoint
from dflash2_heads import save_dflash2_head
from dflash_heads import FAMILY, save_dflash_head
from eagle3_heads import bigram_head, bigram_target, save_specforge
from forced_streaming import force_streaming
from tiny_pair import VOCAB, save_tokenizer

import specdec
from specdec.config import SpecConfig
from specdec.models.names import MTP_HEAD

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:"]
LOAD: dict[str, Any] = {"memory_budget": "4GiB", "ctx_size": 256, "exact": "on"}
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 5}


def save_target(family: str, directory: Path, **sizes: int) -> Path:
    save_tiny_checkpoint(family, directory, vocab_size=VOCAB, max_position_embeddings=256, **sizes)
    save_tokenizer(directory)
    return directory


def with_eagle3(folder: Path) -> tuple[Path, Path]:
    target = bigram_target(folder / "target", VOCAB)
    save_tokenizer(target)
    return target, save_specforge(bigram_head(target, 252), folder / "head")


def with_dflash(folder: Path) -> tuple[Path, Path]:
    head = save_dflash_head(folder / "head", FAMILY, window=20)
    return save_target("qwen3", folder / "target"), head


def with_dflash2(folder: Path) -> tuple[Path, Path]:
    head = save_dflash2_head(folder / "head", vocab_size=VOCAB)
    return save_target("llama", folder / "target"), head


def with_assistant(folder: Path) -> tuple[Path, Path]:
    target = save_target("gemma4", folder / "target", vocab_size_per_layer_input=VOCAB)
    return target, save_assistant(folder / "head", vocab_size=VOCAB)


PAIRS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "own-mtp": lambda _: ("pair:hybrid", MTP_HEAD),
    "mtp": lambda _: ("pair:target", "pair:mtp"),
    "eagle3": with_eagle3,
    "dflash": with_dflash,
    "dflash2": with_dflash2,
    "assistant": with_assistant,
}


@pytest.mark.parametrize("kind", PAIRS)
def test_text_is_the_targets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = PAIRS[kind](tmp_path)
    with specdec.load(target, spec_type="none", **LOAD) as llm:
        expected = {
            temperature: [
                llm.generate(prompt, temperature=temperature, **ASKED).token_ids
                for prompt in PROMPTS
            ]
            for temperature in (0.0, 0.8)
        }
    force_streaming(monkeypatch)
    options = {"draft_model": head, "spec_type": "draft", "num_draft_tokens": 12}
    with specdec.load(target, **options, **LOAD) as llm:
        for width in (1, 8):
            spec = SpecConfig(("draft",), tree_width=width, num_draft_tokens=12)
            for temperature, token_ids in expected.items():
                for prompt, ids in zip(PROMPTS, token_ids, strict=True):
                    result = llm.generate(
                        prompt, temperature=temperature, spec=spec, cache_prompt=False, **ASKED
                    )
                    assert result.token_ids == ids, (width, temperature)
                    assert result.stats.drafted_tokens > 0
                    assert result.stats.bytes_streamed > 0
