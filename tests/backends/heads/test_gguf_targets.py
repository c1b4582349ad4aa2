"""EAGLE-3 and DFlash heads beside GGUF targets: their proposals are those of llama.cpp's own graph,
and those beside the same model as a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from checkpoint_gguf import save_checkpoint_gguf
from checkpoints import save_tiny_checkpoint
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID, save_dflash_head
from eagle3_heads import N_LAYERS, new_head, save_gguf_head, save_speculators
from gguf_models import save_tiny_gguf
from llama_eagle3 import has_extensions, layer_inputs, llama_head
from loaded_heads import load, load_beside_gguf, load_eagle3, run, target_states
from tiny_gguf import save_tiny_architecture

from backends.contract.backend import PREFIX, UnsupportedModel
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.gguf.model import load_gguf_model
from backends.heads.dflash.source import DFlashSource
from backends.heads.gguf_target import StoredOutputHead
from backends.heads.gguf_tensors import StoredEmbedding, decoded
from backends.heads.opened import open_head
from backends.heads.target import CheckpointTarget
from backends.hf.source import HfSource
from backends.llama.backend import LlamaBackend
from backends.llama.source import GgufSource
from offload.errors import SpecdecError
from offload.placement.placement import Placement

pytestmark = pytest.mark.gguf
TOKENS = [17, 80, 33, 9, 61, 12]
PLACES = ["mmap", "ram", "stream"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny_checkpoint(request.param, folder / "target", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def gguf_target(checkpoint: Path) -> Path:
    return save_checkpoint_gguf(checkpoint, checkpoint.parent / "target.gguf")


def beside(target: Path, head: Path, place: str):
    if place == "stream":
        return load_beside_gguf(target, head, is_streamed=True)
    return load_beside_gguf(target, head, load_mode=place)


@pytest.mark.skipif(not has_extensions(), reason="this llama.cpp has no functions for heads")
@pytest.mark.parametrize("place", PLACES)
def test_eagle3_proposals_are_llama_cpps(gguf_target: Path, tmp_path: Path, place: str) -> None:
    """The target's states by llama.cpp's own function, and its graph of the head."""
    path = save_gguf_head(new_head(seed=3, has_own_embedding=True), tmp_path / "head.gguf")
    expected_states = layer_inputs(gguf_target, [5, *TOKENS[:-1]], [2, 3, 3])
    with beside(gguf_target, path, place) as (backend, head), llama_head(path) as reference:
        states = target_states(backend, [5, *TOKENS[:-1]])
        np.testing.assert_allclose(states, expected_states, rtol=1e-5, atol=1e-4)
        sequence = head.new_sequence()
        output = run(head, sequence, TOKENS, states)
        logits, own = reference.run(TOKENS, 0, reference.fused(expected_states))
        np.testing.assert_allclose(output.logits, logits, atol=5e-4)
        parent, proposed, expected = PREFIX, [], []
        for i in range(5):
            proposed.append(int(output.logits[-1].argmax()))
            expected.append(int(logits[-1].argmax()))
            output = run(head, sequence, proposed[-1:], output.hidden_states[-1:], [parent])
            (parent,) = output.node_ids
            logits, own = reference.run(expected[-1:], len(TOKENS) + i, own[-1:])
        assert proposed == expected
        assert len(set(proposed)) > 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shares", [False, True], ids=["own", "shared"])
def test_eagle3_is_the_same_beside_a_checkpoint(
    checkpoint: Path, gguf_target: Path, tmp_path: Path, place: str, shares: bool
) -> None:
    """With tables of its own, or with the target's embedding and output head."""
    head = new_head(seed=4, has_own_embedding=not shares, has_own_vocabulary=not shares)
    if shares:
        tensors = {k: v for k, v in head.tensors.items() if k != "lm_head.weight"}
        path = save_speculators(replace(head, tensors=tensors), tmp_path / "h")
    else:
        path = save_speculators(head, tmp_path / "h")
    with load_eagle3(checkpoint, path) as (backend, drafting):
        states = target_states(backend, TOKENS)
        expected = run(drafting, drafting.new_sequence(), TOKENS, states)
    with beside(gguf_target, path, place) as (backend, drafting):
        own = target_states(backend, TOKENS)
        np.testing.assert_allclose(own, states, rtol=1e-5, atol=1e-4)
        output = run(drafting, drafting.new_sequence(), TOKENS, own)
        np.testing.assert_allclose(output.logits, expected.logits, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(output.hidden_states, expected.hidden_states, atol=1e-3)


@pytest.mark.parametrize("place", PLACES)
def test_dflash_is_the_same_beside_a_checkpoint(
    checkpoint: Path, gguf_target: Path, tmp_path: Path, place: str
) -> None:
    path = save_dflash_head(tmp_path / "head", num_target_layers=N_LAYERS, target_layer_ids=[1, 3])
    source = HfSource(checkpoint, BackendOptions())
    own = DFlashSource(CheckpointTarget(source.model), BackendOptions(), path)
    with load(source) as backend:
        own.share_weights(backend)
        with load(own) as drafting:
            expected = marginals(backend, drafting)
    with beside(gguf_target, path, place) as (backend, drafting):
        np.testing.assert_allclose(marginals(backend, drafting), expected, rtol=1e-4, atol=1e-3)


def marginals(target, head) -> np.ndarray:
    """Return logits of a block after TOKENS, of which the last is pending."""
    states = target_states(target, TOKENS[:-1])
    kv = head.new_sequence()
    head.forward([SequenceInput(kv, TOKENS[:-1], logits_at=[], hidden_states=states)])
    block = [TOKENS[-1], *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)]
    parents = [PREFIX, *range(kv.next_node_id, kv.next_node_id + BLOCK_SIZE - 1)]
    return head.forward([SequenceInput(kv, block, parents, range(1, BLOCK_SIZE))])[0].logits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K"])
def test_logits_are_products_with_the_output_head_where_it_is(
    tmp_path: Path, place: str, kind: str
) -> None:
    """In the file's layout, or in the one for this processor into which llama.cpp read it."""
    size = {"hidden": 256, "feed_forward": 256}
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", dtype=kind, n_layers=2, **size)
    model = load_gguf_model(path)
    options = {"hidden_state_layers": (0,), "n_threads": 1}
    mode = {"load_mode": place}
    if place == "stream":
        mode = {"placement": Placement(model.layers, 2)}
    rows = torch.randn((3, 5, 256), generator=torch.Generator().manual_seed(1))
    with LlamaBackend(model, max_context=64, max_nodes=8, **options, **mode) as backend:
        backend.new_sequence().prefill(TOKENS)
        output = StoredOutputHead(model.vocab_size, 2)
        output.bind(backend)
        logits = output(rows)
    expected = rows @ decoded(model.index["output.weight"], torch.float32).T
    assert logits.shape == (3, 5, 96)
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "F16"])
def test_rows_of_an_embedding_are_read_and_decoded(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    path = save_checkpoint_gguf(checkpoint, tmp_path / "m.gguf", kind)
    record = GgufSource(path, BackendOptions(n_threads=1)).model.index["token_embd.weight"]
    table, tokens = decoded(record, torch.float32), torch.tensor([[5, 90, 5, 0]])
    embedding = StoredEmbedding(record, torch.float32, 2.0)
    assert torch.equal(embedding(tokens), 2.0 * table[tokens])
    assert torch.equal(embedding.rows(tokens), table[tokens])


def test_the_head_shares_the_targets_tables_without_memory(
    gguf_target: Path, tmp_path: Path
) -> None:
    path = save_dflash_head(tmp_path / "h", num_target_layers=N_LAYERS, target_layer_ids=[1, 3])
    target = GgufSource(gguf_target, BackendOptions(n_threads=1))
    head = open_head(path, target, BackendOptions(n_threads=1))
    assert isinstance(head, DFlashSource)
    own = sum(r.n_bytes for r in head.model.index.values())
    layers = sum(layer.n_bytes for layer in head.layers)
    assert head.non_layer_bytes + layers < own + 8 * 4096
    assert head.hidden_state_bytes == 2 * 32 * 4
    assert head.head_bytes == target.model.index["output.weight"].n_bytes
    assert head.measure_compute(beside_reads=False).head_per_byte is not None
    assert head.target_layers == (1, 3)


def test_heads_that_a_gguf_target_cannot_serve_are_refused(tmp_path: Path) -> None:
    several = GgufSource(
        save_tiny_architecture("gemma3n", tmp_path / "g.gguf"), BackendOptions(n_threads=1)
    )
    options = {"hidden_size": 64, "vocab_size": 96}
    head = save_dflash_head(tmp_path / "h", num_target_layers=22, target_layer_ids=[1, 3])
    refuse(head, several, "takes hidden states of 32 numbers, the target's have 64")
    head = _wide(tmp_path / "w", several.model.n_layers, [1, 3], options)
    refuse(head, several, r"outputs of the layers \[1, 3\] .* \(gemma3n\): name a draft model")
    llama = GgufSource(
        save_tiny_architecture("llama", tmp_path / "l.gguf"), BackendOptions(n_threads=1)
    )
    head = _wide(tmp_path / "last", 4, [1, 3], options)
    refuse(head, llama, r"outputs of the layers \[3\] .* \(llama\): name a draft model")


def _wide(directory: Path, n_layers: int, layers: list[int], options: dict) -> Path:
    return save_dflash_head(
        directory, num_target_layers=n_layers, target_layer_ids=layers, **options
    )


def refuse(head: Path, target: GgufSource, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as error:
        open_head(head, target, BackendOptions(n_threads=1))
    assert "\n" not in str(error.value)


def test_logits_before_a_pass_of_the_target_are_refused(gguf_target: Path, tmp_path: Path) -> None:
    path = save_dflash_head(tmp_path / "h", num_target_layers=N_LAYERS, target_layer_ids=[1, 3])
    with load_beside_gguf(gguf_target, path) as (_, head):
        kv = head.new_sequence()
        states = np.zeros((1, 64), dtype=np.float32)
        head.forward([SequenceInput(kv, [5], logits_at=[], hidden_states=states)])
        with pytest.raises(SpecdecError, match="after a pass of its target"):
            head.forward([SequenceInput(kv, [3, 3], [PREFIX, kv.next_node_id], [1])])
