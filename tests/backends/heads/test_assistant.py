"""Gemma 4 assistants: proposals as transformers', over the target's own KV; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from assistant_heads import Reference, change_config, save_assistant
from loaded_heads import load

from backends.contract.backend import PREFIX, BackendError, UnsupportedModel
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.heads.assistant import AssistantSource
from backends.heads.kinds import may_fit
from backends.heads.opened import open_head
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from offload.formats.tensors import CheckpointError

PROMPT = [5, 17, 80, 33, 9, 61, 12]
TEXT = [7 * i % 90 + 3 for i in range(71)]
"""Longer than the window, and than a block of the KV cache."""


@contextmanager
def loaded(target: Path, head: Path) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    source = HfSource(target, BackendOptions())
    draft = AssistantSource(source, BackendOptions(), head)
    with load(source) as backend:
        draft.share_weights(backend)
        with load(draft) as drafting:
            yield backend, drafting


def prefilled(backend, token_ids):
    """Return a sequence with these tokens, and the last one's hidden state [1, hidden]."""
    kv = backend.new_sequence()
    at = [len(token_ids) - 1]
    chunk = SequenceInput(kv, token_ids, logits_at=[], hidden_states_at=at)
    return kv, backend.forward([chunk])[0].hidden_states


def node_input(own, context, tokens, states):
    n = range(len(tokens))
    return SequenceInput(own, tokens, [PREFIX] * len(tokens), list(n), n, states, context)


def chain(drafting, context, state, pending, n_tokens):
    """Return greedy (tokens, logits) of the head run repeatedly."""
    own, rows, tokens = drafting.new_sequence(), [], [pending]
    for _ in range(n_tokens):
        output = drafting.forward([node_input(own, context, tokens[-1:], state)])[0]
        rows.append(output.logits[0])
        state = output.hidden_states
        tokens.append(int(rows[-1].argmax()))
    own.close()
    return tokens[1:], np.stack(rows)


@pytest.fixture(scope="module")
def directories(checkpoint_factory, tmp_path_factory):
    return checkpoint_factory("gemma4"), save_assistant(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def models(directories):
    with loaded(*directories) as backends:
        yield backends


@pytest.fixture(autouse=True)
def end_sequences(models):
    yield
    for backend in models:
        for sequence in tuple(backend._sequences):
            sequence.close()


@pytest.mark.parametrize("context", [PROMPT[:2], PROMPT, TEXT[:65], TEXT[:66], TEXT])
def test_proposals_are_those_of_transformers(directories, models, context):
    backend, drafting = models
    kv, state = prefilled(backend, context[:-1])
    tokens, logits = chain(drafting, kv, state, context[-1], 6)
    expected, rows = Reference(*directories).candidates(context, 6)
    np.testing.assert_allclose(logits, rows.numpy(), atol=3e-4)
    assert tokens == expected


def test_clusters_are_those_of_transformers(directories, tmp_path):
    """Tokens of clusters that are not chosen have no logits here, and small ones there."""
    target, head = directories[0], save_assistant(tmp_path, clusters=True)
    with loaded(target, head) as (backend, drafting):
        kv, state = prefilled(backend, TEXT[:-1])
        tokens, logits = chain(drafting, kv, state, TEXT[-1], 6)
    expected, rows = Reference(target, head).candidates(TEXT, 6)
    is_chosen = np.isfinite(logits)
    assert (is_chosen.sum(-1) == 36).all()
    np.testing.assert_allclose(logits[is_chosen], rows.numpy()[is_chosen], atol=3e-4)
    assert tokens == expected


def test_a_target_without_shared_layers(checkpoint_factory, tmp_path):
    """A head attends to the last layer of each type (transformers gives no states of such a
    target)."""
    target = checkpoint_factory("gemma4", num_kv_shared_layers=0)
    head = save_assistant(tmp_path)
    source = HfSource(target, BackendOptions())
    assert AssistantSource(source, BackendOptions(), head).model.context_layers == {
        "sliding_attention": 2,
        "full_attention": 3,
    }


def test_committed_nodes_and_forks_are_seen(models):
    """The context is what is committed, however it came into the target's blocks."""
    backend, drafting = models
    whole, state = prefilled(backend, TEXT[:-1])
    expected = chain(drafting, whole, state, TEXT[-1], 3)
    whole.close()
    first, _ = prefilled(backend, TEXT[:60])
    grown = first.fork()
    nodes, _ = grown.extend([90, *TEXT[60:-1]], [PREFIX, PREFIX, *range(1, 10)])
    grown.commit(nodes[1:])
    assert list(grown.committed_ids) == TEXT[:-1]
    tokens, logits = chain(drafting, grown, state, TEXT[-1], 3)
    first.close()
    np.testing.assert_allclose(logits, expected[1], atol=3e-4)
    assert tokens == expected[0]


def test_nodes_and_sequences_share_a_pass(models):
    """A node's logits do not depend on those beside it, nor on the other sequence."""
    backend, drafting = models
    contexts = [prefilled(backend, TEXT[:-1]), prefilled(backend, PROMPT[:-1])]
    alone = [chain(drafting, kv, state, 4, 1)[1][0] for kv, state in contexts]
    inputs = [
        node_input(drafting.new_sequence(), kv, [3, 4, 9], np.repeat(state, 3, axis=0))
        for kv, state in contexts
    ]
    for output, row in zip(drafting.forward(inputs), alone, strict=True):
        np.testing.assert_allclose(output.logits[1], row, atol=3e-4)
        assert np.abs(output.logits[0] - row).max() > 0.01


def test_the_targets_kv_stays_as_it_is(models):
    backend, drafting = models
    kv, state = prefilled(backend, TEXT[:-1])
    before = [(item.keys.clone(), item.values.clone()) for item in backend._pool.layers[:2]]
    chain(drafting, kv, state, TEXT[-1], 4)
    for item, (keys, values) in zip(backend._pool.layers[:2], before, strict=True):
        assert torch.equal(item.keys, keys)
        assert torch.equal(item.values, values)
    assert drafting.kv_bytes == 0


def test_an_empty_or_closed_context_is_an_error(models):
    backend, drafting = models
    state, own = np.zeros((1, 32), dtype=np.float32), drafting.new_sequence()
    with pytest.raises(BackendError, match="without tokens"):
        drafting.forward([node_input(own, backend.new_sequence(), [4], state)])
    closed, _ = prefilled(backend, PROMPT)
    closed.close()
    with pytest.raises(BackendError, match="closed"):
        drafting.forward([node_input(own, closed, [4], state)])


def test_memory_and_time_are_those_of_its_own_weights(directories):
    source = HfSource(directories[0], BackendOptions())
    head = AssistantSource(source, BackendOptions(), directories[1])
    assert head.kv_bytes(4096, 64) == 0
    n_stored = (directories[1] / "model.safetensors").stat().st_size
    n_planned = head.non_layer_bytes + sum(layer.n_bytes for layer in head.layers)
    assert 0.9 * n_stored < n_planned < 1.1 * n_stored + 8192
    assert head.head_bytes == 96 * 24 * 4
    assert head.hidden_state_bytes == 32 * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 40}, "hidden states of 40 numbers, and the target has 32"),
        ({"vocab_size": 64}, "a vocabulary of 64, and the target has 96"),
        ({"num_key_value_heads": 4}, "4 heads of 8 numbers .*, and the target has 2 of 8"),
        ({"global_head_dim": 8}, "2 heads of 8 numbers .*, and the target has 2 of 16"),
    ],
)
def test_the_head_of_another_target_is_refused(directories, tmp_path, changes, reason):
    source = HfSource(directories[0], BackendOptions())
    with pytest.raises(UnsupportedModel, match=reason) as error:
        open_head(save_assistant(tmp_path, **changes), source, BackendOptions())
    assert "\n" not in str(error.value)


def test_another_family_is_refused(checkpoint_factory, directories):
    target = checkpoint_factory("llama")
    with pytest.raises(UnsupportedModel, match="for Gemma 4, and the target is llama"):
        open_head(directories[1], HfSource(target, BackendOptions()), BackendOptions())
    assert not may_fit(directories[1], target)
    assert may_fit(directories[1], directories[0])


def test_a_gguf_target_is_refused(directories, tmp_path):
    """Whatever the target is, if it runs through llama.cpp."""

    class GgufTarget:
        path = tmp_path / "gemma4.gguf"

    with pytest.raises(UnsupportedModel, match="Gemma 4 assistant, which drafts for checkpoints"):
        open_head(directories[1], GgufTarget(), BackendOptions())


def test_damaged_heads_are_refused(directories, tmp_path):
    source, options = HfSource(directories[0], BackendOptions()), BackendOptions()
    head = save_assistant(tmp_path / "config")
    change_config(head, text_config={"model_type": "gemma4_text", "num_hidden_layers": -1})
    with pytest.raises(CheckpointError):
        open_head(head, source, options)
    from safetensors.torch import load_file, save_file

    head = save_assistant(tmp_path / "order", clusters=True)
    tensors = load_file(head / "model.safetensors")
    tensors["masked_embedding.token_ordering"][3] = 96
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match="token_ordering"):
        open_head(head, source, options)
