"""Every family of transformers that generates text, as a tiny random checkpoint: exact, or refused.

The table (tests/helpers/all_families.py) is that of docs/models.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from all_families import EXACT, REFUSED
from family_checks import (
    PROMPT,
    TREE_LEAVES,
    TREE_PARENTS,
    TREE_TOKENS,
    path_nodes,
    path_tokens,
    scale,
)
from tiny_configs import save_tiny_family

from backends.attention.batch import BLOCK_SIZE
from backends.attention.stored_rows import kv_formats
from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from backends.hf.self_test import find_exactness
from backends.shapes.hf import hf_shape
from offload.errors import SpecdecError
from offload.placement.experts import ExpertCachePlan, count_experts

TOLERANCE = 5e-5
"""Relative to the largest logit: transformers computes prompts of recurrent layers in chunks."""


def streamed(model: HfModel) -> TorchBackend:
    """Return a backend whose passes have one thread, the number that the self-test tries."""
    plan = None
    if model.experts:
        plan = ExpertCachePlan(model.experts, count_experts(model.experts))
    weights = CpuWeights(model, model.layer_weights, 2, experts=plan)
    return TorchBackend(model, weights, exactness=find_exactness(model, 1), n_threads=1)


def expected_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """Return transformers' logits [tokens, vocabulary] from the prompt's last token on."""
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits[len(PROMPT) - 1 :]


def one_by_one(backend: TorchBackend, token_ids: list[int], n_first: int) -> list[np.ndarray]:
    """Return the same logits of passes over one token each, of which the first has `n_first`."""
    sequence = backend.new_sequence()
    starts = [0, *range(n_first, len(token_ids))]
    ends = [*starts[1:], len(token_ids)]
    rows = [sequence.prefill(token_ids[i:j]) for i, j in zip(starts, ends, strict=True)]
    sequence.close()
    return rows[-(len(token_ids) - len(PROMPT) + 1) :]


def check_scored(backend: TorchBackend) -> None:
    """Logits that are scored in a pass have the bits of those that passes return."""
    rows: list[np.ndarray] = []
    sequence = backend.new_sequence()
    for chunk in (PROMPT[:5], PROMPT[5:]):
        scored_at = range(1, len(chunk))
        item = SequenceInput(
            sequence, chunk, scored_at=scored_at, score=lambda _, row: rows.append(row.copy())
        )
        backend.forward([item])
    sequence.close()
    sequence = backend.new_sequence()
    expected = [sequence.prefill([token]) for token in PROMPT]
    assert np.array_equal(rows, [*expected[1:5], *expected[6:]])
    sequence.close()


def check_family(family: str, path: Path, cache_type: str | None = None) -> None:
    """The logits are transformers' with the model's own cache type."""
    auto = save_tiny_family(family, path)
    reference = auto.from_pretrained(path, dtype=torch.float32).eval()
    model = replace(load_hf_model(path), kv_formats=kv_formats(cache_type, cache_type))
    with streamed(model) as backend:
        sequence = backend.new_sequence()
        prompt = sequence.prefill(PROMPT)
        first = sequence.next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        nodes = list(sequence.extend(TREE_TOKENS, parents)[1])
        for leaf in TREE_LEAVES:
            rows = np.stack([prompt, *(nodes[n] for n in path_nodes(leaf))])
            tokens = [*PROMPT, *path_tokens(leaf)]
            expected = expected_logits(reference, tokens)
            is_close = np.abs(rows - expected).max() <= TOLERANCE * scale(expected)
            assert is_close == (cache_type is None)
            # The prompt in passes of one token for one path: it is the same for all of them.
            n_first = 1 if leaf == TREE_LEAVES[0] else len(PROMPT)
            assert np.array_equal(rows, one_by_one(backend, tokens, n_first))
        check_scored(backend)
        assert backend._pool.block_bytes == BLOCK_SIZE * model.kv_bytes_per_token
    assert hf_shape(path).vocab_size == backend.vocab_size


@pytest.mark.slow_except(10)
@pytest.mark.parametrize("cache_type", [None, "q8_0"])
@pytest.mark.parametrize("family", EXACT)
def test_it_has_transformers_logits_and_the_bits_of_one_token_per_pass(
    family: str, cache_type: str | None, tmp_path: Path
) -> None:
    check_family(family, tmp_path, cache_type)


@pytest.mark.usefixtures("_torch_threads")
def test_the_bits_do_not_depend_on_the_threads_of_the_process(tmp_path: Path) -> None:
    """Torch's own number of threads is another one outside of passes."""
    torch.set_num_threads(2)
    check_family("apertus", tmp_path)


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_says_why(family: str, tmp_path: Path) -> None:
    save_tiny_family(family, tmp_path)
    transformers.logging.set_verbosity_error()
    with pytest.raises(SpecdecError, match=REFUSED[family]) as error:
        load_hf_model(tmp_path)
    assert "\n" not in str(error.value)
