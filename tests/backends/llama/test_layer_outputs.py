"""Outputs of layers out of passes of GGUF models: transformers' hidden states, the same bits in
every kind of pass, and of every architecture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from checkpoint_gguf import save_checkpoint_gguf
from checkpoints import save_tiny_checkpoint
from gguf_models import save_tiny_gguf
from gguf_streaming import in_memory, streamed, streamed_experts
from llama_eagle3 import has_extensions
from tiny_gguf import save_tiny_architecture
from tiny_gguf_kinds import ARCHITECTURES, RECURRENT, REFUSED, WITH_HEADS

from backends.contract.backend import LAST_HIDDEN_STATE, PREFIX
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions, Loading
from backends.gguf.model import load_gguf_model
from backends.llama.source import GgufSource
from offload.errors import SpecdecError
from offload.placement.placement import Placement
from offload.placement.plan import pin_all

pytestmark = pytest.mark.gguf
TOKENS = np.random.default_rng(3).integers(3, 90, 14).tolist()
TREE, PARENTS = [7, 20, 30, 21, 22, 31], [-1, 0, 0, 1, 3, 2]
LAYERS = (0, 1)
WITHOUT = ("gemma3n",)
"""Architectures whose layers have several streams of hidden states."""
NOT_STREAMED = ("kimi-k3",)
WITH_OWN_HEADS = ["cohere2moe-head", "hy_v3-head", "step35-head"]
"""Architectures beside those of ARCHITECTURES."""
RUN = [name for name in ARCHITECTURES if name not in REFUSED] + WITH_OWN_HEADS


def states_of(backend, token_ids, layers=LAYERS):
    backend.collect_hidden_states(layers)
    everything = range(len(token_ids))
    chunk = SequenceInput(backend.new_sequence(), token_ids, hidden_states_at=everything)
    return backend.forward([chunk])[0].hidden_states


def open_exact(path: Path, name: str = "stream"):
    """Return a source and its loading with the outputs of all layers that a pass returns."""
    source = GgufSource(path, BackendOptions(n_threads=1, is_exact=True))
    layers = source.model.layers
    plan = Placement(layers, 2) if name == "stream" else Placement(pin_all(layers), 0)
    taken = tuple(sorted(source.trial.output_layers))
    return source, Loading(
        plan, max_context=64, max_nodes=40, max_num_tokens=40, load_mode=name,
        hidden_state_layers=taken, max_num_seqs=4, kv_tokens=200,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = save_tiny_checkpoint(family, tmp_path / "model", num_hidden_layers=4)
    model = load_gguf_model(save_checkpoint_gguf(folder, tmp_path / "m.gguf"))
    with torch.no_grad():
        output = AutoModelForCausalLM.from_pretrained(folder)(
            torch.tensor([TOKENS]), output_hidden_states=True
        )
    expected = torch.cat([output.hidden_states[layer + 1][0] for layer in (2, 0)], dim=1).numpy()
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
    for backend in (
        in_memory(model, hidden_state_layers=(2, 0), **options),
        streamed(model, hidden_state_layers=(2, 0), **options),
    ):
        with backend:
            states = states_of(backend, TOKENS, (2, 0))
            np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("name", RUN)
def test_of_every_architecture(name: str, tmp_path: Path) -> None:
    """Tried before loading in a child process; the same bits token by token and streamed, and the
    logits of a pass that returns no states."""
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    source, loading = open_exact(path, "mmap")
    layers = loading.hidden_state_layers
    if name in WITHOUT:
        assert layers == ()
        return
    n_layers = source.model.n_layers
    assert set(layers) >= set(range(n_layers - 1))
    with source.load(loading) as backend:
        plain = backend.new_sequence().prefill(TOKENS)
        whole = states_of(backend, TOKENS, layers)
        assert len(np.unique(whole, axis=0)) == len(TOKENS)
        assert np.array_equal(backend.new_sequence().prefill(TOKENS), plain)
        kv = backend.new_sequence()
        for i, token in enumerate(TOKENS):
            node = SequenceInput(kv, [token], [PREFIX], hidden_states_at=[0])
            (output,) = backend.forward([node])
            kv.commit(output.node_ids)
            if source.exactness.is_exact:
                assert np.array_equal(output.hidden_states[0], whole[i])
            else:
                np.testing.assert_allclose(output.hidden_states[0], whole[i], atol=5e-2)
    if name not in NOT_STREAMED:
        source, loading = open_exact(path)
        with source.load(loading) as backend:
            assert np.array_equal(states_of(backend, TOKENS, layers), whole)


@pytest.mark.skipif(not has_extensions(), reason="this llama.cpp has no functions for heads")
@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", "llama gemma4 gpt-oss minimax-m2 lfm2 qwen35 nemotron_h".split())
def test_outputs_are_the_next_layers_inputs(name: str, tmp_path: Path) -> None:
    """llama.cpp's own function knows these architectures; for others it ends the process."""
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    code = (
        f"import sys; sys.path[:0] = ['tests/helpers']; import numpy as np; from pathlib import "
        f"Path; from llama_eagle3 import layer_inputs; np.save({str(tmp_path / 'x.npy')!r}, "
        f"layer_inputs(Path({str(path)!r}), {TOKENS}, [1, 2]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    source, loading = open_exact(path, "mmap")
    with source.load(loading) as backend:
        states = states_of(backend, TOKENS, (0, 1))
    np.testing.assert_allclose(states, np.load(tmp_path / "x.npy"), atol=2e-2)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", WITH_HEADS)
def test_the_last_hidden_state_beside_a_layers_output(name: str, tmp_path: Path) -> None:
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    for mode in ("mmap", "stream"):
        source, loading = open_exact(path, mode)
        with source.load(loading) as backend:
            last = states_of(backend, TOKENS, (LAST_HIDDEN_STATE,))
            first = states_of(backend, TOKENS, (1,))
            both = states_of(backend, TOKENS, (LAST_HIDDEN_STATE, 1))
            assert np.array_equal(both, np.concatenate([last, first], axis=1))


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_trees_sequences_and_chunks(name: str, tmp_path: Path) -> None:
    """A tree beside another sequence's chunk, and a prompt in several passes, have the bits of each
    path alone."""
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    source, loading = open_exact(path, "mmap")
    layers = loading.hidden_state_layers[:2]
    with source.load(loading) as backend:
        whole = states_of(backend, TOKENS, layers)
        paths = [[7], [7, 20], [7, 30], [7, 20, 21], [7, 20, 21, 22], [7, 30, 31]]
        alone = [states_of(backend, TOKENS + ids, layers)[-1] for ids in paths]
    for mode in ("mmap", "stream"):
        source, loading = open_exact(path, mode)
        with source.load(loading) as backend:
            backend.collect_hidden_states(layers)
            kv, other = backend.new_sequence(), backend.new_sequence()
            kv.prefill(TOKENS)
            first = kv.next_node_id
            parents = [PREFIX if p < 0 else first + p for p in PARENTS]
            nodes = SequenceInput(kv, TREE, parents, [1], hidden_states_at=[5, 0, 1, 2, 3, 4])
            chunk = SequenceInput(other, TOKENS, logits_at=[], hidden_states_at=[2, 7])
            tree, prompt = backend.forward([nodes, chunk])
            assert np.array_equal(tree.hidden_states, np.stack([alone[5], *alone[:5]]))
            assert np.array_equal(prompt.hidden_states, whole[[2, 7]])
            backend.max_num_tokens = 8
            assert np.array_equal(states_of(backend, TOKENS, layers), whole)
            assert (name in RECURRENT) == source.model.is_recurrent


def test_states_beside_experts_that_are_read_on_demand(tmp_path: Path) -> None:
    model = load_gguf_model(save_tiny_gguf("mixtral", tmp_path / "m.gguf"))
    with in_memory(model, hidden_state_layers=LAYERS) as backend:
        expected = states_of(backend, TOKENS)
    for n_slots in (0, 2):
        with streamed_experts(model, n_slots=n_slots, hidden_state_layers=LAYERS) as backend:
            assert np.array_equal(states_of(backend, TOKENS), expected)


def test_what_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf"))
    with (
        in_memory(model) as backend,
        pytest.raises(SpecdecError, match=r"load it with hidden_state_layers=\(1,\)"),
    ):
        backend.collect_hidden_states((1,))
    with in_memory(model, hidden_state_layers=(1,)) as backend:
        with pytest.raises(SpecdecError, match="no hidden states of this architecture"):
            states_of(backend, TOKENS, (1, LAST_HIDDEN_STATE))
        with pytest.raises(SpecdecError, match="output of layer 2 for 1 of 14 tokens"):
            states_of(backend, TOKENS, (1, 2))  # the last layer's is of tokens with logits


def test_an_error_in_the_callback_ends_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf"))
    for make in (in_memory, streamed):
        with make(model, hidden_state_layers=LAYERS) as backend:
            expected = states_of(backend, TOKENS)
            with monkeypatch.context() as patched:
                patched.setattr(backend._outputs, "is_complete", lambda *_: False)
                with pytest.raises(SpecdecError, match="no hidden states of layer 0"):
                    states_of(backend, TOKENS)
            assert np.array_equal(states_of(backend, TOKENS), expected)
