"""EAGLE-3 heads against llama.cpp's own graphs: the states that they take, logits and proposals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import in_dtype, save_tiny_checkpoint
from eagle3_heads import HIDDEN, N_LAYERS, new_head, save_gguf_head
from llama_eagle3 import has_extensions, layer_inputs, llama_head
from loaded_heads import load_eagle3, run, target_states

from backends.contract.backend import PREFIX
from backends.hf.backend import TorchBackend
from specdec.pair import pair_path

pytestmark = pytest.mark.skipif(
    not has_extensions(), reason="this llama.cpp has no functions for heads"
)
TOKENS = [17, 80, 33, 9, 61, 12]
FLAGS = [(), ("norm_before_residual",), ("norm_before_fc", "norm_before_residual")]


@pytest.mark.parametrize("flags", FLAGS)
def test_logits_states_and_proposals_are_llama_cpps(tmp_path: Path, flags: tuple[str, ...]) -> None:
    head = new_head(*flags, seed=3, has_own_embedding=True)
    path = save_gguf_head(head, tmp_path / "head.gguf")
    target = save_tiny_checkpoint("llama", tmp_path / "target", num_hidden_layers=N_LAYERS)
    with load_eagle3(target, path) as (backend, drafting), llama_head(path) as reference:
        states = target_states(backend, [5, *TOKENS[:-1]])
        assert states.shape == (len(TOKENS), 3 * HIDDEN)
        sequence = drafting.new_sequence()
        output = run(drafting, sequence, TOKENS, states)
        logits, own = reference.run(TOKENS, 0, reference.fused(states))
        np.testing.assert_allclose(output.logits, logits, atol=2e-4)
        np.testing.assert_allclose(output.hidden_states, own, atol=2e-4)

        parent, proposed, expected = PREFIX, [], []
        for i in range(5):
            proposed.append(int(output.logits[-1].argmax()))
            expected.append(int(logits[-1].argmax()))
            output = run(drafting, sequence, proposed[-1:], output.hidden_states[-1:], [parent])
            (parent,) = output.node_ids
            logits, own = reference.run(expected[-1:], len(TOKENS) + i, own[-1:])
        assert proposed == expected
        assert len(set(proposed)) > 1


def test_layers_are_numbered_as_in_llama_cpp(tmp_path: Path) -> None:
    """A head takes the inputs of the layers in its file: outputs of those before them."""
    taken = (2, 3, 5)
    folder = in_dtype(pair_path("pair:target"), tmp_path / "target", torch.float32)
    expected = layer_inputs(pair_path("pair:target.gguf"), TOKENS, taken)
    with TorchBackend.resident(folder) as backend:
        states, shifted = (
            _states(backend, [layer + shift for layer in taken]) for shift in (-1, 0)
        )
    scale = np.abs(expected).max()
    assert np.abs(states - expected).max() < 0.01 * scale  # its matrices are F16, not bf16
    assert np.abs(shifted - expected).max() > 0.1 * scale


def _states(backend: TorchBackend, layers: list[int]) -> np.ndarray:
    backend.collect_hidden_states(layers)
    return target_states(backend, TOKENS)
