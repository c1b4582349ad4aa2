"""Advice on a draft to download for a target, by its architecture and vocabulary size."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from backends.checkpoint.kinds import config_parts, read_raw
from offload.formats.gguf_header import GgufFile


class _Family(NamedTuple):
    architectures: str
    vocabulary: range
    draft: str


_QWEN_2 = range(151_000, 152_500)
_QWEN_3_5 = range(248_000, 249_000)
_LLAMA_2, _LLAMA_3 = range(32_000, 32_100), range(128_000, 128_600)
_ANY = range(1, 1 << 31)
_HEAD_INSIDE = "a copy of this model that kept its MTP head (-m COPY -md mtp)"
_FAMILIES = (
    _Family("qwen2 qwen2_moe qwen2moe", _QWEN_2, "Qwen/Qwen2.5-0.5B-Instruct for -md"),
    _Family("qwen3 qwen3_moe qwen3moe", _QWEN_2, "Qwen/Qwen3-0.6B for -md"),
    _Family("qwen3_5_text qwen3_5 qwen35", _QWEN_3_5, _HEAD_INSIDE),
    _Family("qwen3_5_moe_text qwen3_5_moe qwen35moe", _QWEN_3_5, _HEAD_INSIDE),
    _Family("qwen3_next qwen3next", _QWEN_2, f"{_HEAD_INSIDE}, or Qwen/Qwen3-0.6B for -md"),
    _Family("llama", _LLAMA_3, "meta-llama/Llama-3.2-1B-Instruct for -md"),
    _Family("llama", _LLAMA_2, "TinyLlama/TinyLlama-1.1B-Chat-v1.0 for -md"),
    _Family("gemma2", _ANY, "google/gemma-2-2b-it for -md"),
    _Family("gemma3 gemma3_text", _ANY, "google/gemma-3-270m-it or google/gemma-3-1b-it for -md"),
    _Family(
        "gemma4_text gemma4_unified_text", _ANY, "the assistant published for this model, for -md"
    ),
    _Family("gpt_oss gpt-oss", _ANY, "an EAGLE-3 head made for this model, for -md"),
    _Family("deepseek_v3 deepseek2 glm4_moe glm4moe", _ANY, _HEAD_INSIDE),
    _Family(
        "granite granitemoe granitemoehybrid granitehybrid", _ANY, "a 350M model of Granite for -md"
    ),
)


def draft_to_download(path: Path) -> str:
    """Return advice: which model or head to download as a draft of this target.

    path: result of `resolve_model`.
    """
    architecture, vocab_size = _described(path)
    for family in _FAMILIES:
        if architecture in family.architectures.split() and vocab_size in family.vocabulary:
            return f"download {family.draft}, or train a draft (specdec train-draft)"
    return (
        f"download a smaller {architecture or 'model'} with the same tokenizer for -md, or train a "
        "draft (specdec train-draft)"
    )


def _described(path: Path) -> tuple[str, int]:
    """Return the architecture of a target and the size of its vocabulary."""
    if path.is_file():
        metadata = GgufFile.read(path).metadata
        n_tokens = metadata.array_length("tokenizer.ggml.tokens") or 0
        return str(metadata.get("general.architecture", "")), n_tokens
    *_, config = config_parts(read_raw(path))
    return str(config.get("model_type", "")), int(config.get("vocab_size") or 0)
