"""Every family of transformers that generates text, as a tiny random checkpoint: exact, or refused.

The table (tests/helpers/all_families.py) is that of docs/models.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from all_families import EXACT, REFUSED
from family_checks import PROMPT, TREE_PARENTS, TREE_TOKENS, path_tokens, scale
from tiny_configs import save_tiny_family

from backends.contract.backend import PREFIX
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import HfModel, load_hf_model
from backends.hf.self_test import find_exactness
from backends.shapes.hf import hf_shape
from offload.errors import SpecdecError
from offload.placement.experts import ExpertCachePlan, count_experts

TOLERANCE = 5e-5
"""Relative to the largest logit: transformers computes prompts of recurrent layers in chunks."""


def streamed(model: HfModel) -> TorchBackend:
    plan = None
    if model.experts:
        plan = ExpertCachePlan(model.experts, count_experts(model.experts))
    weights = CpuWeights(model, model.layer_weights, 2, experts=plan)
    return TorchBackend(model, weights, exactness=find_exactness(model, 1))


def expected_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([token_ids])).logits[0, -1].numpy()
    return logits


@pytest.mark.slow_except(10)
@pytest.mark.parametrize("family", EXACT)
def test_it_has_transformers_logits_and_the_bits_of_one_token_per_pass(
    family: str, tmp_path: Path
) -> None:
    auto = save_tiny_family(family, tmp_path)
    reference = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with streamed(load_hf_model(tmp_path)) as backend:
        sequence = backend.new_sequence()
        logits = [sequence.prefill(PROMPT)]
        first = sequence.next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        logits += list(sequence.extend(TREE_TOKENS, parents)[1])
        paths = [PROMPT, *([*PROMPT, *path_tokens(n)] for n in range(len(TREE_TOKENS)))]
        for row, path in zip(logits, paths, strict=True):
            expected = expected_logits(reference, path)
            assert np.abs(row - expected).max() <= TOLERANCE * scale(expected)
            alone = backend.new_sequence()
            for token in path:
                last = alone.prefill([token])
            assert np.array_equal(last, row)
            alone.close()
    assert hf_shape(tmp_path).vocab_size == backend.vocab_size


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_says_why(family: str, tmp_path: Path) -> None:
    save_tiny_family(family, tmp_path)
    transformers.logging.set_verbosity_error()
    with pytest.raises(SpecdecError, match=REFUSED[family]) as error:
        load_hf_model(tmp_path)
    assert "\n" not in str(error.value)
