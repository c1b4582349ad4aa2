"""DFlash heads: marginals as transformers computes them, step by step, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_heads import (
    BLOCK_SIZE,
    FAMILY,
    MASK_TOKEN_ID,
    PUBLIC,
    TARGET_LAYERS,
    Reference,
    save_dflash_head,
)
from transformers.cache_utils import DynamicCache

from backends.contract.backend import LAST_HIDDEN_STATE, PREFIX, BackendError, UnsupportedModel
from backends.contract.sequence import SequenceInput
from backends.heads.dflash.source import load_dflash_head
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from offload.formats.tensors import CheckpointError

PROMPT = [5, 17, 80, 33, 9, 61, 12, 44, 70]
ROUNDS = ([31], [8, 90, 2], [55, 4, 4, 19, 77, 23], [6])
"""Tokens that the target emits in each step: the bonus token, and accepted ones before it."""


@contextmanager
def loaded(target: Path, head: Path) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    model = load_hf_model(target)
    with (
        TorchBackend.kept_in_memory(model) as backend,
        TorchBackend.kept_in_memory(load_dflash_head(CheckpointTarget(model), head)) as drafting,
    ):
        backend.collect_hidden_states((TARGET_LAYERS[0], LAST_HIDDEN_STATE))
        yield backend, drafting


def target_states(backend: TorchBackend, token_ids: list[int]) -> np.ndarray:
    everything = range(len(token_ids))
    chunk = SequenceInput(backend.new_sequence(), token_ids, hidden_states_at=everything)
    return backend.forward([chunk])[0].hidden_states


def context(sequence, token_ids, states):
    return SequenceInput(sequence, token_ids, logits_at=[], hidden_states=states)


def block(sequence, pending: int, size: int = BLOCK_SIZE) -> SequenceInput:
    first = sequence.next_node_id
    parents = [PREFIX, *range(first, first + size - 1)]
    masks = [MASK_TOKEN_ID] * (size - 1)
    return SequenceInput(sequence, [pending, *masks], parents, range(1, size))


def rounds(backend, drafting, prompt=PROMPT) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (context, marginals) of every step of a sequence."""
    token_ids, n_known, sequence = list(prompt), 0, drafting.new_sequence()
    for emitted in ([], *ROUNDS):
        token_ids = token_ids + emitted
        states = target_states(backend, token_ids[:-1])
        drafting.forward([context(sequence, token_ids[n_known:-1], states[n_known:])])
        n_known = len(token_ids) - 1
        logits = drafting.forward([block(sequence, token_ids[-1])])[0].logits
        sequence.commit([])
        yield token_ids, logits


@pytest.mark.parametrize("layout", [PUBLIC, FAMILY])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_marginals_are_those_of_transformers(checkpoint_factory, tmp_path, family, layout):
    target = checkpoint_factory(family)
    head = save_dflash_head(tmp_path / "head", layout)
    reference = Reference(target, save_dflash_head(tmp_path / "reference", FAMILY))
    with loaded(target, head) as models:
        for token_ids, logits in rounds(*models):
            expected = reference.marginals(token_ids).numpy()
            assert logits.shape == (BLOCK_SIZE - 1, 96)
            np.testing.assert_allclose(logits, expected, atol=3e-4)
            assert (logits.argmax(-1) == expected.argmax(-1)).all()


def test_windows_are_those_of_transformers(checkpoint_factory, tmp_path):
    """The window of the second layer is shorter than the prompt, and ends within later blocks."""
    target = checkpoint_factory("qwen3")
    head = save_dflash_head(tmp_path, FAMILY, window=8)
    reference = Reference(target, head)
    with loaded(target, head) as models:
        for token_ids, logits in rounds(*models, [*PROMPT, *PROMPT]):
            expected = reference.marginals(token_ids).numpy()
            np.testing.assert_allclose(logits, expected, atol=3e-4)


@pytest.mark.parametrize(
    "changes", [{"is_causal": None}, {"is_causal": True}, {"is_causal": False}]
)
def test_sliding_and_causal_layers_of_the_public_layout(checkpoint_factory, tmp_path, changes):
    """The module itself, with masks written out, is the reference for what transformers lacks."""
    target = checkpoint_factory("llama")
    head = save_dflash_head(tmp_path, window=8, **changes)
    with loaded(target, head) as models:
        for token_ids, logits in rounds(*models):
            states = target_states(models[0], token_ids[:-1])
            expected = written_out(models[1], token_ids, states, changes["is_causal"])
            np.testing.assert_allclose(logits, expected, atol=3e-4)


def written_out(drafting: TorchBackend, token_ids, states, is_causal: bool | None) -> np.ndarray:
    """Return the marginals by plain attention over the context and one block."""
    model = load_dflash_head_of(drafting)
    n_context = len(token_ids) - 1
    places = torch.arange(n_context + BLOCK_SIZE)
    distance = places[n_context:, None] - places[None, :]
    allowed = {}
    for kind, window in (("full", 10_000), ("sliding", 8)):
        sees_ahead = not (kind == "sliding" if is_causal is None else is_causal)
        allowed[kind] = (distance < window) & (sees_ahead | (distance >= 0))
    cache = DynamicCache()
    with torch.no_grad():
        model.add_context(torch.from_numpy(states)[None], places[None, :n_context], cache)
        ids = torch.tensor([[token_ids[-1]] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
        hidden = model.block_embedding(ids)
        embeddings = model.rotary_emb(hidden, places[None, n_context:])
        for layer, kind in zip(model.layers, ("full", "sliding"), strict=True):
            mask = torch.zeros(allowed[kind].shape).masked_fill(~allowed[kind], -torch.inf)
            hidden = layer(
                hidden,
                position_embeddings=embeddings,
                attention_mask=mask[None, None],
                past_key_values=cache,
            )
        return model.logits(model.norm(hidden))[0, 1:].numpy()


def load_dflash_head_of(drafting: TorchBackend):
    """Return the module of a head with "eager" attention, and parameters of its own."""
    from backends.heads.dflash.model import DFlashDraftModel

    loaded_model = drafting._model.model
    config = type(loaded_model.config).from_dict(loaded_model.config.to_dict())
    model = DFlashDraftModel._from_config(config, attn_implementation="eager")
    model.load_state_dict(loaded_model.state_dict())
    model.share(*loaded_model.block_embedding.shared, loaded_model.get_output_embeddings())
    return model.eval()


def test_sequences_of_a_batch_are_as_alone(checkpoint_factory, tmp_path):
    """Also with blocks of different lengths, at different positions."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1]]
    sizes = [BLOCK_SIZE, BLOCK_SIZE - 2, BLOCK_SIZE]
    with loaded(checkpoint_factory("llama"), save_dflash_head(tmp_path)) as (backend, drafting):
        states = [target_states(backend, prompt[:-1]) for prompt in prompts]
        expected = []
        for prompt, own, size in zip(prompts, states, sizes, strict=True):
            sequence = drafting.new_sequence()
            drafting.forward([context(sequence, prompt[:-1], own)])
            expected.append(drafting.forward([block(sequence, prompt[-1], size)])[0].logits)
            sequence.close()
        sequences = [drafting.new_sequence() for _ in prompts]
        rows = zip(sequences, prompts, states, strict=True)
        drafting.forward([context(sequence, prompt[:-1], own) for sequence, prompt, own in rows])
        blocks = zip(sequences, prompts, sizes, strict=True)
        outputs = drafting.forward([block(kv, prompt[-1], size) for kv, prompt, size in blocks])
        for output, logits in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output.logits, logits, atol=3e-4)


def test_a_cut_context_is_as_if_it_had_never_been_longer(checkpoint_factory, tmp_path):
    with loaded(checkpoint_factory("llama"), save_dflash_head(tmp_path)) as (backend, drafting):
        states = target_states(backend, PROMPT)
        short, cut = drafting.new_sequence(), drafting.new_sequence()
        drafting.forward([context(short, PROMPT[:4], states[:4]), context(cut, PROMPT, states)])
        drafting.forward([block(cut, 7)])
        cut.rollback(4)
        logits = [drafting.forward([block(sequence, 9)])[0].logits for sequence in (short, cut)]
        np.testing.assert_allclose(logits[0], logits[1], atol=3e-4)


def test_context_and_blocks_cannot_share_a_pass(checkpoint_factory, tmp_path):
    with loaded(checkpoint_factory("llama"), save_dflash_head(tmp_path)) as (backend, drafting):
        states = target_states(backend, PROMPT)
        a, b = drafting.new_sequence(), drafting.new_sequence()
        with pytest.raises(BackendError, match="cannot share a pass"):
            drafting.forward([context(a, PROMPT, states), block(b, 9)])


def test_a_head_can_be_trained(checkpoint_factory, tmp_path):
    """Gradients reach every parameter through a cache, and a saved head is read again."""
    from backends.heads.dflash.config import load_dflash_config
    from backends.heads.dflash.model import DFlashDraftModel

    save_dflash_head(tmp_path / "head")
    target = load_hf_model(checkpoint_factory("llama"))
    config = load_dflash_config(tmp_path / "head")
    model = DFlashDraftModel._from_config(config, attn_implementation="sdpa")
    embedding = torch.nn.Embedding(96, 32)
    model.share(embedding, torch.nn.Linear(32, 96, bias=False))
    cache, places = DynamicCache(), torch.arange(10)[None]
    model.add_context(torch.randn(1, 4, 64), places[:, :4], cache)
    ids, mask = torch.tensor([[9, 3, 3, 3, 3, 3]]), torch.zeros(1, 1, 6, 10)
    hidden = model.forward_block(ids, places[:, 4:], mask, cache)
    model.logits(hidden[:, 1:]).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path / "trained")
    again = load_dflash_head(CheckpointTarget(target), tmp_path / "trained")
    assert again.block == replace(model.block, looks_ahead=(True, True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 64}, "takes hidden states of 64 numbers, the target's have 32"),
        ({"target_layer_ids": [0, 3]}, "takes layer 3, the target has 3 layers"),
        ({"num_target_layers": 4}, "its target has 4 layers, this one 3"),
        ({"vocab_size": 97}, "its target has 97 tokens, this one 96"),
        ({"mask_token_id": 96}, "its mask is token 96, the target has 96 tokens"),
    ],
)
def test_heads_of_other_targets_are_refused(checkpoint_factory, tmp_path, changes, reason):
    head = save_dflash_head(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=f"head of another target: .*{reason}"):
        load_dflash_head(CheckpointTarget(load_hf_model(checkpoint_factory("llama"))), head)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": "6"}, "block_size is '6'"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"target_layer_ids": []}, "target_layer_ids is"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids is"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks 11 tensors"),
        ({"num_hidden_layers": 1, "layer_types": None}, "of another kind: DFlash has no layers.1"),
        ({"intermediate_size": 40}, "has shape"),
    ],
)
def test_broken_heads_are_refused(checkpoint_factory, tmp_path, changes, reason):
    head = save_dflash_head(tmp_path, **changes)
    with pytest.raises((CheckpointError, UnsupportedModel), match=reason) as error:
        load_dflash_head(CheckpointTarget(load_hf_model(checkpoint_factory("llama"))), head)
    assert "\n" not in str(error.value)


def test_heads_with_more_parts_are_refused(checkpoint_factory, tmp_path):
    head = save_dflash_head(tmp_path, dflash_config={"projector_type": "dspark"})
    with pytest.raises(UnsupportedModel, match="projector_type of 'dspark'"):
        load_dflash_head(CheckpointTarget(load_hf_model(checkpoint_factory("llama"))), head)
