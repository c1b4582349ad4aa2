"""DFlash 2 heads: candidates and their transitions as llama.cpp computes them, and as written out
by vLLM's formula; alone and in batches."""

from __future__ import annotations

import numpy as np
import pytest
from dflash2_heads import TOP_K, save_dflash2_head
from dflash_gguf import llama_dflash, save_dflash_gguf
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID
from llama_eagle3 import has_extensions
from loaded_heads import load_dflash, target_states

from backends.contract.backend import PREFIX, MaskedBlock, UnsupportedModel
from backends.contract.sequence import SequenceInput
from backends.heads.dflash.source import load_dflash_head
from backends.heads.target import CheckpointTarget
from backends.hf.loading import load_hf_model
from offload.formats.tensors import CheckpointError

PROMPT = [5, 17, 80, 33, 9, 61, 12, 44, 70]
PENDING = [31, 7, 90]


def block(sequence, pending: int, size: int = BLOCK_SIZE) -> SequenceInput:
    first = sequence.next_node_id
    parents = [PREFIX, *range(first, first + size - 1)]
    masks, masked = [MASK_TOKEN_ID] * (size - 1), range(1, size)
    return SequenceInput(sequence, [pending, *masks], parents, masked, masked)


def begun(drafting, token_ids, states):
    """Return a sequence with the states of a context."""
    sequence = drafting.new_sequence()
    drafting.forward([SequenceInput(sequence, token_ids, logits_at=[], hidden_states=states)])
    return sequence


def unpacked(output):
    """Return (tokens [n, k], scores [n, k, k])."""
    rows = output.hidden_states
    return rows[:, :TOP_K].astype(int), rows[:, TOP_K:].reshape(-1, TOP_K, TOP_K)


@pytest.fixture(scope="module")
def directories(checkpoint_factory, tmp_path_factory):
    return checkpoint_factory("llama"), save_dflash2_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def models(directories):
    with load_dflash(*directories) as backends:
        yield backends


@pytest.fixture(autouse=True)
def end_sequences(models):
    yield
    for backend in models:
        for sequence in tuple(backend._sequences):
            sequence.close()


@pytest.mark.skipif(not has_extensions(), reason="this llama.cpp has no functions for heads")
@pytest.mark.parametrize("pending", PENDING)
def test_transitions_are_llama_cpps(directories, models, tmp_path, pending):
    backend, drafting = models
    states = target_states(backend, PROMPT)
    sequence = begun(drafting, PROMPT, states)
    tokens, scores = unpacked(drafting.forward([block(sequence, pending)])[0])
    path = save_dflash_gguf(directories[1], tmp_path / "head.gguf", target=directories[0])
    with llama_dflash(path) as reference:
        expected, edges = reference.transitions(states, pending)
    for i in range(BLOCK_SIZE - 1):
        own, other = np.argsort(tokens[i]), np.argsort(expected[i])
        assert (tokens[i][own] == expected[i][other]).all()
        before = slice(None) if i == 0 else np.argsort(tokens[i - 1])
        of_other = slice(None) if i == 0 else np.argsort(expected[i - 1])
        np.testing.assert_allclose(
            scores[i][before][:, own], edges[i][of_other][:, other], atol=5e-4
        )
    assert len(set(tokens.flatten().tolist())) > TOP_K


def written_out(drafting, states, pending: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, scores) by loops over positions, taps and pairs of candidates."""
    import torch
    from transformers.cache_utils import DynamicCache

    from backends.heads.dflash.model import DFlashDraftModel

    of_backend = drafting._model.model
    config = type(of_backend.config).from_dict(of_backend.config.to_dict())
    model = DFlashDraftModel._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(of_backend.state_dict())
    model.share(*of_backend.block_embedding.shared, of_backend.get_output_embeddings())

    def convolved(conv, side, x, delta):
        n_groups, result = delta.shape[-1], torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(delta.shape[2], i + 1)):
                wide = delta[i, side, tap].repeat_interleave(x.shape[-1] // n_groups)
                result[i] += (conv.base_kernel[side, tap] + wide) * x[i - tap]
        return result

    def around(conv, part, x):
        delta = conv.kernel_projection(x).view(len(x), 2, conv.base_kernel.shape[1], -1)
        return convolved(conv, 1, part(convolved(conv, 0, x, delta)), delta)

    n, cache = len(states), DynamicCache()
    with torch.no_grad():
        model.add_context(torch.from_numpy(states)[None], torch.arange(n)[None], cache)
        ids = torch.tensor([[pending] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
        x = model.block_embedding(ids)[0]
        places = model.rotary_emb(x[None], torch.arange(n, n + BLOCK_SIZE)[None])
        mask = torch.zeros(1, 1, BLOCK_SIZE, n + BLOCK_SIZE)
        for layer in model.layers:

            def attend(y, layer=layer):
                options = {"position_embeddings": places, "attention_mask": mask}
                return layer.self_attn(y[None], past_key_values=cache, **options)[0][0]

            x = x + around(layer.attention_conv, attend, layer.input_layernorm(x))
            x = x + around(layer.mlp_conv, layer.mlp, layer.post_attention_layernorm(x))
        h = model.norm(x)[1:]
        unary, tokens = model.logits(h).topk(TOP_K)
        selector = model.candidate_selector
        a, b = selector.predecessor_codebook, selector.successor_codebook
        scores = torch.empty(len(h), TOP_K, TOP_K)
        for i in range(len(h)):
            before = [pending] * TOP_K if i == 0 else tokens[i - 1].tolist()
            for p, earlier in enumerate(before):
                for c, token in enumerate(tokens[i].tolist()):
                    gated = a[earlier] * selector.hidden_projection(h[i])
                    scores[i, p, c] = unary[i, c] + gated @ b[token]
    return tokens.numpy(), scores.numpy()


@pytest.mark.parametrize("pending", PENDING)
def test_transitions_are_the_formulas(models, pending):
    backend, drafting = models
    states = target_states(backend, PROMPT)
    sequence = begun(drafting, PROMPT, states)
    tokens, scores = unpacked(drafting.forward([block(sequence, pending)])[0])
    expected, edges = written_out(drafting, states, pending)
    assert (tokens == expected).all()
    np.testing.assert_allclose(scores, edges, atol=3e-4)


def test_sequences_of_a_batch_are_as_alone(models):
    """No tap reaches into another block, also where its positions go on from the last ones."""
    backend, drafting = models
    prompts, sizes = [PROMPT[:3], PROMPT, PROMPT[::-1]], [BLOCK_SIZE, BLOCK_SIZE - 2, BLOCK_SIZE]
    states = [target_states(backend, prompt) for prompt in prompts]
    for sequence in tuple(backend._sequences):
        sequence.close()
    alone = []
    for prompt, own, size in zip(prompts, states, sizes, strict=True):
        sequence = begun(drafting, prompt, own)
        alone.append(unpacked(drafting.forward([block(sequence, 9, size)])[0]))
        sequence.close()
    assert len(prompts[0]) + sizes[0] == len(prompts[1])  # so these follow one another
    sequences = [begun(drafting, *pair) for pair in zip(prompts, states, strict=True)]
    together = drafting.forward(
        [block(sequence, 9, size) for sequence, size in zip(sequences, sizes, strict=True)]
    )
    for output, (tokens, scores) in zip(together, alone, strict=True):
        assert (unpacked(output)[0] == tokens).all()
        np.testing.assert_allclose(unpacked(output)[1], scores, atol=3e-4)


def test_a_loaded_head_says_that_it_has_transitions(models):
    assert models[1].masked_block == MaskedBlock(BLOCK_SIZE, MASK_TOKEN_ID, TOP_K)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"selector_top_k": 0}, "needs whole numbers from 1"),
        ({"conv_kernel_size": "2"}, "needs whole numbers from 1"),
        ({"conv_group_size": 12}, "conv_group_size is 12, which does not divide the 32 channels"),
        ({"selector_top_k": 97}, "it has 97 candidates, the target has 96 tokens"),
        ({"projector_type": "dspark"}, "projector_type of 'dspark'"),
        ({"conv_kernel_size": 2}, "has shape"),
    ],
)
def test_other_heads_are_refused(directories, tmp_path, changes, reason):
    head = save_dflash2_head(tmp_path, **changes)
    with pytest.raises((CheckpointError, UnsupportedModel), match=reason) as error:
        load_dflash_head(CheckpointTarget(load_hf_model(directories[0])), head)
    assert "\n" not in str(error.value)


def test_tables_may_be_named_as_weights(directories, tmp_path):
    from safetensors.torch import load_file, save_file

    head = save_dflash2_head(tmp_path)
    tensors = load_file(head / "model.safetensors")
    named = {f"{n}.weight" if n.endswith("_codebook") else n: t for n, t in tensors.items()}
    save_file(named, head / "model.safetensors", metadata={"format": "pt"})
    load_dflash_head(CheckpointTarget(load_hf_model(directories[0])), head)
