"""A tiny model, and the output of `transformers.generate` for it in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_pair import save_model
from transformers import AutoModelForCausalLM, GenerationConfig

import specdec
from specdec.api import LLM

PROMPT = [70, 80, 90, 100, 70, 80]
N_TOKENS = 16
PAD = 1
BEAMS = {"num_beams": 3, "num_return_sequences": 3}


def save_target(folder: Path) -> Path:
    return save_model(folder, seed=0, max_position_embeddings=512)


def save_draft(folder: Path) -> Path:
    return save_model(folder, seed=1, num_hidden_layers=1)


def load_pair(target: Path, draft: Path) -> LLM:
    return specdec.load(target, draft, ctx_size=64, num_draft_tokens=8, num_beams=3)


def load_reference(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def config_of(options: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": N_TOKENS, "pad_token_id": PAD, "eos_token_id": 2, **options}
    )


def generate(model, config: GenerationConfig, prompt=PROMPT, **more: Any) -> list[list[int]]:
    """Return transformers' new tokens, including padding behind the end of a sequence."""
    actual = model.generate(torch.tensor([prompt]), generation_config=config, **more)
    return actual[:, len(prompt) :].tolist()


def assert_equal(outputs, expected: list[list[int]]) -> None:
    assert len(outputs) == len(expected)
    for output, requested in zip(outputs, expected, strict=True):
        n_tokens = len(output.token_ids)
        assert list(output.token_ids) == requested[:n_tokens]
        assert set(requested[n_tokens:]) <= {PAD, -1}  # the latter without an EOS
