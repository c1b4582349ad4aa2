"""MTP heads: as transformers computes them, and right in every tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact_targets import exact_resident
from mtp_heads import LAYOUTS, head_logits, save_with_mtp_head

from backends.contract.backend import LAST_HIDDEN_STATE, PREFIX, UnsupportedModel
from backends.contract.sequence import SequenceInput
from backends.heads.mtp import load_mtp_head
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model

PROMPT = [5, 17, 80, 33, 9, 61, 12]
"""Tokens; the head begins with the second one."""


@pytest.fixture(scope="module", params=LAYOUTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_mtp_head(request.param, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[TorchBackend, TorchBackend]:
    target = load_hf_model(directory)
    with (
        TorchBackend.kept_in_memory(target) as backend,
        TorchBackend.kept_in_memory(load_mtp_head(target, directory)) as head,
    ):
        for passes in (backend, head):
            passes.collect_hidden_states((LAST_HIDDEN_STATE,))
        yield backend, head


def target_states(backend: TorchBackend, token_ids: list[int]) -> np.ndarray:
    n_tokens = len(token_ids)
    sequence = backend.new_sequence()
    chunk = SequenceInput(sequence, token_ids, hidden_states_at=range(n_tokens))
    return backend.forward([chunk])[0].hidden_states


def run(head, sequence, token_ids, states, parents=None):
    n_tokens = len(token_ids)
    everything = range(n_tokens)
    chunk = SequenceInput(sequence, token_ids, parents, everything, everything, states)
    return head.forward([chunk])[0]


def test_logits_and_states_are_those_of_transformers(directory, models):
    backend, head = models
    states = target_states(backend, PROMPT[:-1])
    output = run(head, head.new_sequence(), PROMPT[1:], states)
    logits, hidden = head_logits(directory, PROMPT)
    np.testing.assert_allclose(output.logits, logits.numpy(), atol=2e-4)
    np.testing.assert_allclose(output.hidden_states, hidden.numpy(), atol=2e-4)
    assert (output.logits.argmax(-1) == logits.argmax(-1).numpy()).all()


def test_a_chain_of_nodes_goes_on_from_the_heads_own_states(directory, models):
    """Greedy proposals equal transformers' with the head run repeatedly on one cache."""
    import torch
    from mtp_heads import load_head
    from transformers.cache_utils import MtpCache

    backend, head = models
    sequence = head.new_sequence()
    output = run(head, sequence, PROMPT[1:], target_states(backend, PROMPT[:-1]))
    parent, proposed = PREFIX, []
    for _ in range(4):
        proposed.append(int(output.logits[-1].argmax()))
        output = run(head, sequence, proposed[-1:], output.hidden_states[-1:], [parent])
        (parent,) = output.node_ids

    model, reference = load_head(directory)
    cache = MtpCache(config=model.config.get_mtp_config())
    expected: list[int] = []
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        hidden, inputs, start = model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:], 1
        for _ in range(4):
            places = torch.arange(start, start + inputs.shape[1])[None]
            hidden = reference.forward_layer(0, hidden, places, cache, input_ids=inputs)[:, -1:]
            expected.append(int(model.lm_head(hidden)[0, -1].argmax()))
            start, inputs = start + inputs.shape[1], torch.tensor([expected[-1:]])
    assert proposed == expected


def test_a_branch_is_the_same_beside_others(models):
    backend, head = models
    states = target_states(backend, PROMPT[:-1])
    alone, beside = head.new_sequence(), head.new_sequence()
    state = [run(head, kv, PROMPT[1:], states).hidden_states[-1:] for kv in (alone, beside)]
    expected = run(head, alone, [7], state[0], [PREFIX]).logits
    rows = run(head, beside, [3, 7, 9], np.repeat(state[1], 3, axis=0), [PREFIX] * 3).logits
    np.testing.assert_allclose(rows[1:2], expected, atol=2e-4)


def test_hidden_states_of_layers_are_those_of_transformers(directory, models):
    import torch
    from mtp_heads import load_target

    backend, _ = models
    backend.collect_hidden_states((0, 2))
    states = target_states(backend, PROMPT)
    backend.collect_hidden_states((LAST_HIDDEN_STATE,))
    with torch.no_grad():
        outputs = load_target(directory).model(torch.tensor([PROMPT]), output_hidden_states=True)
    # transformers' last entry is normed; the third layer's own output is not among them.
    np.testing.assert_allclose(states[:, :32], outputs.hidden_states[1][0].numpy(), atol=2e-4)
    assert states.shape == (len(PROMPT), 64)


def test_hidden_states_do_not_depend_on_the_pass(checkpoint_factory):
    """A token's states have the same bits alone and beside others, as its logits have."""
    with exact_resident(checkpoint_factory("llama")) as backend:
        backend.collect_hidden_states((1, LAST_HIDDEN_STATE))
        whole = target_states(backend, PROMPT)
        sequence = backend.new_sequence()
        for i, token in enumerate(PROMPT):
            chunk = SequenceInput(sequence, [token], hidden_states_at=[0])
            assert np.array_equal(backend.forward([chunk])[0].hidden_states[0], whole[i])


def test_a_checkpoint_without_a_head_is_refused(checkpoint_factory):
    directory = checkpoint_factory("llama")
    model = load_hf_model(directory)
    with pytest.raises(UnsupportedModel, match="has no MTP head"):
        load_mtp_head(model, directory)
