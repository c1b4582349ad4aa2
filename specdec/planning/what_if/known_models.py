"""Sizes of well-known models, for advice before anything is downloaded.

From their published config.json; of the Llamas also from meta-llama/llama-models
(models/sku_list.py), of gpt-oss from openai/gpt-oss (README.md). A model whose sizes are not
certain is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from backends.gguf.outline import GPT_OSS, MXFP4, Q4_K_M, Q8_0, GgufSizes, LinearAttention

_LLAMA_8B = GgufSizes("llama", 4096, 14336, 32, 32, 8, 128, 128_256, 131_072)
_QWEN_8B = GgufSizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151_936, 40_960)
_GPT_OSS_20B = GgufSizes(
    GPT_OSS, 2880, 2880, 24, 64, 8, 64, 201_088, 131_072,
    num_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
)  # fmt: skip
SIZES: Mapping[str, GgufSizes] = MappingProxyType(
    {
        "Llama-3.2-1B": replace(
            _LLAMA_8B,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        "Llama-3.1-8B": _LLAMA_8B,
        "Llama-3.3-70B": replace(
            _LLAMA_8B,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
        ),
        "Qwen3-0.6B": replace(
            _QWEN_8B,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
        "Qwen3-4B": replace(
            _QWEN_8B, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True
        ),
        "Qwen3-8B": _QWEN_8B,
        "Qwen3-14B": replace(
            _QWEN_8B,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=40,
            num_attention_heads=40,
        ),
        "Qwen3-32B": replace(
            _QWEN_8B,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
        ),
        "Qwen3-30B-A3B": replace(
            _QWEN_8B,
            architecture="qwen3moe",
            hidden_size=2048,
            intermediate_size=768,
            num_hidden_layers=48,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        "gpt-oss-20b": _GPT_OSS_20B,
        "gpt-oss-120b": replace(_GPT_OSS_20B, num_hidden_layers=36, num_experts=128),
        "Qwen3.6-35B-A3B": GgufSizes(
            "qwen35moe", 2048, 512, 40, 16, 2, 256, 248_320, 262_144,
            num_experts=256,
            num_experts_per_tok=8,
            shared_expert_intermediate_size=512,
            linear=LinearAttention(16, 32, 128),
        ),
        "Qwen3.8-27B": GgufSizes(
            "qwen35", 5120, 17408, 64, 24, 4, 256, 248_320, 262_144,
            linear=LinearAttention(16, 48, 128),
        ),
    }
)  # fmt: skip


REPOSITORIES: Mapping[str, str] = MappingProxyType(
    {
        "Llama-3.2-1B": "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Llama-3.1-8B": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        "Llama-3.3-70B": "bartowski/Llama-3.3-70B-Instruct-GGUF",
        "Qwen3-0.6B": "Qwen/Qwen3-0.6B-GGUF",
        "Qwen3-4B": "Qwen/Qwen3-4B-GGUF",
        "Qwen3-8B": "Qwen/Qwen3-8B-GGUF",
        "Qwen3-14B": "Qwen/Qwen3-14B-GGUF",
        "Qwen3-32B": "Qwen/Qwen3-32B-GGUF",
        "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B-GGUF",
        "gpt-oss-20b": "ggml-org/gpt-oss-20b-GGUF",
        "gpt-oss-120b": "ggml-org/gpt-oss-120b-GGUF",
        "Qwen3.6-35B-A3B": "unsloth/Qwen3.6-35B-A3B-GGUF",
        "Qwen3.8-27B": "unsloth/Qwen3.8-27B-GGUF",
    }
)
"""Repositories on the hub with GGUF files of the models; their existence is not checked here."""


def model_id(name: str, file_type: str) -> str:
    """Return the name of a known model's file for -m and `specdec pull`."""
    return f"{REPOSITORIES[name]}:{file_type}"


@dataclass(frozen=True)
class KnownPair:
    """A target in a file type, and a draft with its tokenizer, which is Q8_0; None: n-grams."""

    target: str
    file_type: str
    draft: str | None


_DRAFTS: dict[str, str | None] = {
    "Qwen3-4B": "Qwen3-0.6B",
    "Llama-3.1-8B": "Llama-3.2-1B",
    "Qwen3-8B": "Qwen3-0.6B",
    "Qwen3-14B": "Qwen3-0.6B",
    "Qwen3-30B-A3B": "Qwen3-0.6B",
    "gpt-oss-20b": None,
    "Qwen3.8-27B": None,
    "Qwen3-32B": "Qwen3-0.6B",
    "Qwen3.6-35B-A3B": None,
    "Llama-3.3-70B": "Llama-3.2-1B",
    "gpt-oss-120b": None,
}
PAIRS = tuple(
    KnownPair(target, file_type, draft)
    for target, draft in _DRAFTS.items()
    for file_type in ((MXFP4,) if target.startswith("gpt-oss") else (Q4_K_M, Q8_0))
)
"""Pairs to recommend, from the smallest target to the largest."""
