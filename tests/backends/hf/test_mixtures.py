"""Mixtures of experts with expert slots, against transformers and to the bit."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import MIXTURES, in_dtype
from family_checks import (
    PROMPT,
    TOLERANCE,
    TREE_PARENTS,
    TREE_TOKENS,
    path_tokens,
    reference_logits,
    scale,
)
from plain_rows import Plain
from safetensors.torch import load_file, save_file
from sequence_histories import CONTEXT, MAX_NODES, try_sequences

from backends.contract.backend import PREFIX, UnsupportedModel
from backends.contract.source import BackendOptions, Loading
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource
from backends.shapes.hf import hf_shape
from offload.placement.experts import ExpertCachePlan, count_experts
from offload.placement.plan import plan_placement


def opened(directory, n_slots=None, **options):
    """Stream the dense parts; experts have this many slots, or one each."""
    model = load_hf_model(directory)
    plan = ExpertCachePlan(model.experts, n_slots or count_experts(model.experts))
    return TorchBackend(model, CpuWeights(model, model.layer_weights, 2, experts=plan), **options)


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("n_slots", [None, 2])
@pytest.mark.parametrize("family", MIXTURES)
def test_prefill_and_tree_equal_transformers(family, n_slots, checkpoint_factory):
    directory = checkpoint_factory(family)
    with opened(directory, n_slots) as backend:
        expected = reference_logits(directory, PROMPT)[-1]
        assert np.abs(own(backend).prefill(PROMPT) - expected).max() <= TOLERANCE * scale(expected)
        first = own(backend).next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        _, logits = own(backend).extend(TREE_TOKENS, parents)
        for node, row in enumerate(logits):
            expected = reference_logits(directory, PROMPT + path_tokens(node))[-1]
            assert np.abs(row - expected).max() <= TOLERANCE * scale(expected)


@pytest.mark.parametrize("n_used", [0, -1, 65])
def test_experts_of_a_token_that_are_not_among_all_experts(n_used, checkpoint_factory, tmp_path):
    directory = shutil.copytree(checkpoint_factory("qwen3-moe"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["num_experts_per_tok"] = n_used
    (directory / "config.json").write_text(json.dumps(config))
    for read in (load_hf_model, hf_shape):
        with pytest.raises(
            UnsupportedModel, match=f"num_experts_per_tok is {n_used}, must be 1 to 12"
        ):
            read(directory)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"], ids=["separate", "stacked"])
def test_experts_of_integers_are_refused(family, checkpoint_factory, tmp_path):
    directory = shutil.copytree(checkpoint_factory(family), tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        names = [name for name in weights if re.search(r"experts\b.*down_proj(\.weight)?$", name)]
        save_file({**weights, **{name: weights[name].int() for name in names}}, file)
    with pytest.raises(UnsupportedModel, match=r"experts\S*down_proj\S* is stored as I32"):
        load_hf_model(directory)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", MIXTURES)
def test_any_history_gives_the_bits_of_one_token_per_pass(
    family, dtype, checkpoint_factory, tmp_path
):
    """Alone, beside other rows, in a tree; with experts evicted, and with all cached."""
    directory = in_dtype(checkpoint_factory(family), tmp_path, dtype)
    sources = [HfSource(directory, BackendOptions(is_exact=True)) for _ in range(2)]
    assert sources[0].exactness.is_exact, sources[0].exactness
    few, all_pinned = (loaded(source, n) for source, n in zip(sources, (4, None), strict=True))
    with few as backend, all_pinned as plain:
        try_sequences(backend, Plain(plain), max_seqs=1, longest=20, max_examples=3)


def loaded(source, n_slots=None):
    placement = plan_placement(source.layers, 1 << 40)
    if n_slots is not None:
        placement = replace(placement, experts=ExpertCachePlan(source.experts, n_slots))
    return source.load(Loading(placement, CONTEXT, MAX_NODES, MAX_NODES))
