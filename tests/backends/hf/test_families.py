"""Every supported family, streamed from a tiny random checkpoint, against transformers itself."""

import json

import numpy as np
import pytest
from alone import own
from checkpoints import FAMILIES, HYBRIDS, VOCAB
from family_checks import (
    PROMPT,
    TOLERANCE,
    TREE_PARENTS,
    TREE_TOKENS,
    path_tokens,
    reference_logits,
    scale,
)

from backends.contract.backend import PREFIX, UnsupportedModel
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model


def streamed(directory, **options):
    """A backend with no layer in memory, behind a ring of two slots."""
    model = load_hf_model(directory)
    return TorchBackend(model, CpuWeights(model, model.layer_weights, 2), **options)


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_prefill_and_tree_equal_transformers(family, checkpoint_factory):
    directory = checkpoint_factory(family)
    with streamed(directory) as backend:
        expected = reference_logits(directory, PROMPT)[-1]
        assert np.abs(own(backend).prefill(PROMPT) - expected).max() <= TOLERANCE * scale(expected)
        first = own(backend).next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        _, logits = own(backend).extend(TREE_TOKENS, parents)
        for node, row in enumerate(logits):
            expected = reference_logits(directory, PROMPT + path_tokens(node))[-1]
            assert np.abs(row - expected).max() <= TOLERANCE * scale(expected)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_commit_continues_without_recomputing(family, checkpoint_factory):
    directory = checkpoint_factory(family)
    with streamed(directory) as backend:
        own(backend).prefill(PROMPT)
        first = own(backend).next_node_id
        ids, _ = own(backend).extend(
            TREE_TOKENS, [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        )
        own(backend).commit([ids[0], ids[1], ids[3]], keep=[ids[6]])
        assert own(backend).n_committed == len(PROMPT) + 3
        context = PROMPT + path_tokens(3)
        _, logits = own(backend).extend([50, 51], [ids[6], PREFIX])
        for row, tail in zip(logits, ([TREE_TOKENS[6], 50], [51]), strict=True):
            expected = reference_logits(directory, context + tail)[-1]
            assert np.abs(row - expected).max() <= TOLERANCE * scale(expected)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_layer_major_prefill_in_chunks(family, checkpoint_factory, monkeypatch):
    monkeypatch.setattr("backends.hf.runner.CHUNK_TOKENS", 5)
    directory = checkpoint_factory(family)
    with streamed(directory) as backend:
        own(backend).prefill(PROMPT[:4])
        before = backend.transfer_stats.bytes_streamed
        expected = reference_logits(directory, PROMPT)[-1]
        assert np.abs(own(backend).prefill(PROMPT[4:]) - expected).max() <= TOLERANCE * scale(
            expected
        )
        one_pass = sum(layer.slot_bytes for layer in load_hf_model(directory).layer_weights)
        # Chunks go through a layer while it is in memory; only read-ahead comes on top.
        assert backend.transfer_stats.bytes_streamed - before <= 2 * one_pass


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_streamed_is_bit_equal_to_resident(family, checkpoint_factory):
    directory = checkpoint_factory(family)
    with streamed(directory) as ring, TorchBackend.resident(directory) as resident:
        assert np.array_equal(own(ring).prefill(PROMPT), own(resident).prefill(PROMPT))
        for _ in range(3):
            a, b = (
                own(ring).extend([5, 6], [PREFIX] * 2)[1],
                own(resident).extend([5, 6], [PREFIX] * 2)[1],
            )
            assert np.array_equal(a, b)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_kv_bytes_are_as_planned(family, checkpoint_factory):
    directory = checkpoint_factory(family)
    with TorchBackend.resident(directory) as backend:
        own(backend).prefill(PROMPT)
        planned = load_hf_model(directory).kv_bytes_per_token
        assert backend.kv_bytes == planned * backend.n_kv_allocated


def test_vocabulary_of_the_logits(checkpoint_factory):
    with TorchBackend.resident(checkpoint_factory("llama")) as backend:
        assert backend.vocab_size == VOCAB
        _, logits = own(backend).extend([5, 6, 7], [PREFIX] * 3, logits_at=[2])
        assert logits.shape == (1, VOCAB)
        assert logits.dtype == np.float32


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "jetmoe", "num_hidden_layers": 3}, "jetmoe is not supported: .*Experts"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "mamba"),
        ({"model_type": "gpt_neo"}, "gpt_neo is not supported"),
        ({"model_type": "mpt"}, "mpt is not supported"),
        ({"model_type": "trocr"}, "trocr is not supported: it takes a row's place"),
        ({"model_type": "vit"}, "vit has no causal language model"),
        ({"model_type": "rwkv"}, "rwkv keeps no keys and values"),
        ({"model_type": "openai-gpt"}, "openai-gpt keeps no keys and values"),
        ({"model_type": "xlm", "causal": True}, "xlm keeps no keys and values"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_what_cannot_run_is_refused_by_name(config, named, checkpoint_factory, tmp_path):
    source = checkpoint_factory("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    with pytest.raises(UnsupportedModel, match=named):
        load_hf_model(tmp_path)
