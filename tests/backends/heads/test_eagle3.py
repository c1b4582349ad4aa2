"""EAGLE-3 heads: equal to the paper's equations and to llama.cpp, in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, save_tiny_checkpoint
from eagle3_heads import (
    HEAD_DIM,
    N_LAYERS,
    THETA,
    TinyHead,
    new_head,
    save_gguf_head,
    save_specforge,
    save_speculators,
)
from loaded_heads import load_eagle3, run, target_states
from plain_eagle3 import PlainHead
from transformers import AutoModelForCausalLM

from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions
from backends.heads.source import Eagle3Source
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource

PROMPT = [5, 17, 80, 33, 9, 61, 12]
"""Tokens; the head begins with the second one."""
SAVE: dict[str, Callable[[TinyHead, Path], Path]] = {
    "specforge": save_specforge,
    "speculators": save_speculators,
    "gguf": lambda head, path: save_gguf_head(head, path.with_suffix(".gguf")),
}
HEADS = {
    "specforge": ("specforge", new_head()),
    "specforge-whole": ("specforge", new_head(has_own_vocabulary=False)),
    "speculators": (
        "speculators",
        new_head("norm_before_residual", layer_inputs=(2, 4, 6), has_own_embedding=True),
    ),
    "eagle-3.1": ("speculators", new_head("norm_before_fc", "norm_output", "norm_before_residual")),
    "fc-norm": ("speculators", new_head("fc_norm", "norm_output")),
    "gguf": ("gguf", new_head(has_own_embedding=True)),
    "gguf-3.1": ("gguf", new_head("norm_before_fc", "norm_before_residual")),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return save_tiny_checkpoint(request.param, directory, num_hidden_layers=N_LAYERS)


@pytest.fixture(params=HEADS)
def pair(
    request: pytest.FixtureRequest, target: Path, tmp_path: Path
) -> Iterator[tuple[TorchBackend, TorchBackend, PlainHead]]:
    layout, head = HEADS[request.param]
    path = SAVE[layout](head, tmp_path / "head")
    embedding = AutoModelForCausalLM.from_pretrained(target).get_input_embeddings().weight.detach()
    with load_eagle3(target, path) as (backend, drafting):
        yield backend, drafting, PlainHead(head, embedding)


def assert_close(values: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(values, expected.numpy(), atol=3e-4)


def test_logits_and_states_are_those_of_the_equations(pair):
    backend, head, plain = pair
    states = target_states(backend, PROMPT[:-1])
    output = run(head, head.new_sequence(), PROMPT[1:], states)
    logits, own = plain.run(PROMPT[1:], plain.fused(torch.from_numpy(states)))
    assert output.logits.shape == (len(PROMPT) - 1, VOCAB)
    assert_close(output.logits, logits)
    assert_close(output.hidden_states, own)
    if plain.head.target_ids is not None:
        outside = sorted(set(range(VOCAB)) - set(plain.head.target_ids.tolist()))
        assert outside
        assert np.isneginf(output.logits[:, outside]).all()
        assert np.isfinite(output.logits[:, [0, VOCAB - 1]]).all()


def test_a_chain_of_nodes_goes_on_from_the_heads_own_states(pair):
    backend, head, plain = pair
    states, sequence = target_states(backend, PROMPT[:-1]), head.new_sequence()
    output = run(head, sequence, PROMPT[1:], states)
    parent, proposed = PREFIX, []
    for _ in range(5):
        proposed.append(int(output.logits[-1].argmax()))
        output = run(head, sequence, proposed[-1:], output.hidden_states[-1:], [parent])
        (parent,) = output.node_ids
    assert proposed == plain.chain(PROMPT[1:], torch.from_numpy(states), 5)


def test_branches_are_as_alone(pair):
    backend, head, plain = pair
    states, sequence = target_states(backend, PROMPT[:-1]), head.new_sequence()
    own = run(head, sequence, PROMPT[1:], states).hidden_states[-1:]
    rows = run(head, sequence, [3, 7, 9], np.repeat(own, 3, axis=0), [PREFIX] * 3).logits
    g = torch.cat([plain.fused(torch.from_numpy(states)), torch.from_numpy(own)])
    for row, token in zip(rows, (3, 7, 9), strict=True):
        assert_close(row, plain.run([*PROMPT[1:], token], g)[0][-1])


def test_rope_scaling_is_the_files(target, tmp_path):
    """Llama 3's scaling is options in config.json, and one factor for each frequency in GGUF."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = HfSource(target, BackendOptions())
    folder = save_specforge(new_head(), tmp_path / "head", rope_scaling=scaling)
    plain = frequencies(source, save_specforge(new_head(), tmp_path / "plain"))
    scaled = frequencies(source, folder)
    assert_close(plain.numpy(), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    assert (plain / scaled).max() == pytest.approx(8.0)
    path = save_gguf_head(new_head(), tmp_path / "head.gguf", rope_factors=plain / scaled)
    torch.testing.assert_close(frequencies(source, path), scaled)


def frequencies(target: HfSource, path: Path) -> torch.Tensor:
    model = Eagle3Source(path, CheckpointTarget(target.model), BackendOptions()).model.model
    return model.get_decoder().rotary_emb.inv_freq
