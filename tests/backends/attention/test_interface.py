"""Families that use this attention, and the arguments that it refuses."""

from __future__ import annotations

import ast

import numpy as np
import pytest
import torch
import transformers
from attention_cases import random_tree, reference, states
from checkpoints import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from backends.attention.batch import BatchLayout, SequencePart
from backends.attention.blocked_mask import blocked_mask
from backends.attention.families import adapt
from backends.attention.interface import (
    KEYS_BY_ROW,
    KeyMask,
    _adds_to_attention,
    _looks_into_mask,
    attention,
    hands_mask_on,
)
from backends.attention.layout import CausalLayout
from backends.attention.masks import Segment, SegmentedMask, SegmentedRows, segmented_mask
from backends.contract.backend import BackendError

ADAPTED = {"bloom", "xglm"}  # ALiBi added to the scores; attention of its own


class Module(torch.nn.Module):
    """Stand-in for the attention module that calls."""


def architecture_of(config: transformers.PreTrainedConfig) -> type:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def masks(num_tokens: int, n_keys: int) -> list[KeyMask]:
    layout = CausalLayout(n_keys - num_tokens, num_tokens)
    return [
        blocked_mask(BatchLayout.of(layout), 0, num_tokens, None),
        segmented_mask(BatchLayout.of(layout), 0, num_tokens, None, torch.float32),
    ]


@pytest.mark.parametrize("n_keys", [2, 70])
def test_either_mask_says_how_it_is_computed(n_keys: int) -> None:
    """Masks apply softcap and sinks; without a scale, that of the queries' width is used."""
    query, key, value = states(2, n_keys)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    allowed = CausalLayout(n_keys - 2, 2).allowed(0, 2, None)
    for options in ({}, {"softcap": 1.5}, {"s_aux": sinks}, {"scaling": 0.1}):
        scale, softcap = options.get("scaling", 8**-0.5), options.get("softcap")
        expected = reference(query, key, value, allowed, scale, softcap, options.get("s_aux"))
        for mask in masks(2, n_keys):
            actual, weights = attention(Module(), query, key, value, mask, **options)
            assert weights is None
            assert (actual - expected).abs().max() <= 1e-5


def test_sequences_share_rows_of_the_cache() -> None:
    """Each has 70 keys, in 2 blocks of the cache of 3: together more keys than it has rows."""
    layout = CausalLayout(68, 2)
    parts = (SequencePart(layout, np.array([0, 1])), SequencePart(layout, np.array([0, 2])))
    mask = blocked_mask(BatchLayout(parts), 0, 4, None, is_of_cache=True)
    query, (_, key, value) = states(4, 4)[0], states(4, 134)
    output, _ = attention(Module(), query, key, value, mask)
    for index, part in enumerate(parts):
        own = blocked_mask(BatchLayout((part,)), 0, 2, None, is_of_cache=True)
        rows = slice(2 * index, 2 * index + 2)
        expected, _ = attention(Module(), query[:, :, rows], key, value, own)
        assert torch.equal(output[:, rows], expected)
    with pytest.raises(BackendError, match="its mask is for others"):
        attention(Module(), query, key[:, :, :133], value[:, :, :133], mask)


def _mask_of(n_keys: int) -> SegmentedMask:
    return SegmentedMask((SegmentedRows(0, 2, (Segment(0, n_keys),)),), n_keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": None}, "Module was given no mask of keys, but NoneType"),
        ({"attention_mask": torch.zeros(1, 1, 2, 10)}, "given no mask of keys, but Tensor"),
        ({"attention_mask": _mask_of(9)}, r"Module has keys .*, its mask is for others"),
        ({"attention_mask": masks(2, 9)[0]}, r"Module has keys .*, its mask is for others"),
        ({"position_bias": torch.zeros(4)}, "Module has position_bias"),
        ({"block_indices": torch.zeros(4)}, "Module has block_indices"),
        ({"indices": torch.zeros(4)}, "Module has indices, which this attention lacks"),
        ({"head_mask": torch.ones(4)}, "Module has head_mask"),
        ({"cu_seq_lens_q": torch.ones(4)}, "Module has cu_seq_lens_q"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, object], message: str) -> None:
    query, key, value = states(2, 10)
    arguments: dict[str, object] = {"attention_mask": _mask_of(10), **change}
    with pytest.raises(BackendError, match=message):
        attention(Module(), query, key, value, **arguments)  # type: ignore[arg-type]


def test_what_says_nothing_is_passed_over() -> None:
    query, key, value = states(2, 10)
    said = {"head_mask": None, "dropout": 0.0, "sliding_window": 4, "use_cache": True}
    attention(Module(), query, key, value, _mask_of(10), **said)


def test_several_sequences_are_refused() -> None:
    query, key, value = (x.expand(2, -1, -1, -1) for x in states(2, 10))
    with pytest.raises(BackendError, match="its mask is for others"):
        attention(Module(), query, key, value, _mask_of(10))


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_hand_their_mask_on(family: str) -> None:
    """Families that drop their mask are given adapted forwards."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    softcap = getattr(config, "attn_logit_softcapping", None)
    architecture = architecture_of(config)
    assert hands_mask_on(architecture, bool(softcap)) == (family not in ADAPTED)
    with torch.device("meta"):
        assert adapt(architecture(config)) == (family in ADAPTED)


@pytest.mark.parametrize("name", ["GptOssConfig", "GraniteMoeSWAConfig"])
def test_families_with_sinks_hand_their_mask_on(name: str) -> None:
    assert hands_mask_on(architecture_of(getattr(transformers, name)()), has_softcap=False)


def test_a_family_that_computes_with_the_mask_gets_a_whole_one() -> None:
    assert not hands_mask_on(architecture_of(transformers.DogeConfig()), has_softcap=False)


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ("attend(q, k, attention_mask, mask=attention_mask)", False),
        ("attention_mask is not None", False),
        ("scores + attention_mask", True),
        ("scores += attention_mask", True),
        ("attention_mask[:, :, :, :5]", True),
        ("attention_mask.dtype == bool", True),
    ],
)
def test_what_counts_as_looking_into_the_mask(code: str, is_read: bool) -> None:
    assert any(_looks_into_mask(node) for node in ast.walk(ast.parse(code))) == is_read


@pytest.mark.parametrize(
    ("code", "is_more"),
    [
        ("attention_interface(self, q, k, v, mask, scaling=1.0, dropout=0.0, **kwargs)", False),
        ("attention_interface(self, q, k, v, mask, softcap=3.0, s_aux=sinks)", False),
        ("attention_interface(self, q, k, v, mask, chosen=chosen)", True),
        ("attention_interface(self, q, k, v, mask, indices=chosen)", False),  # checked in a pass
        ("attention_interface(self, q, k, v, mask, head_mask=None)", True),
        ("project(q, indices=chosen)", False),
    ],
)
def test_what_counts_as_more_than_attention(code: str, is_more: bool) -> None:
    assert any(_adds_to_attention(node) for node in ast.walk(ast.parse(code))) == is_more


@pytest.mark.parametrize("family", sorted(ADAPTED))
def test_adapted_families_compute_what_their_own_code_does(family: str) -> None:
    """A tree runs with a blocked mask; a plain tensor goes to the class's own forward."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    torch.manual_seed(0)
    model = architecture_of(config)(config).eval()
    module = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    assert adapt(model)
    layout = random_tree(0, 0, 9, np.random.default_rng(0))
    hidden = torch.randn(1, 9, 32)
    low = torch.finfo(torch.float32).min
    whole = torch.where(torch.from_numpy(layout.allowed(0, 9, None)), 0.0, low)[None, None]
    bias = torch.randn(4, 1, 9)

    def run(mask: object) -> torch.Tensor:
        cache = transformers.DynamicCache()
        if family == "bloom":
            return module(hidden, hidden, bias, mask, layer_past=cache)[0]
        return module(hidden, past_key_values=cache, attention_mask=mask)[0]

    with torch.inference_mode():
        assert (
            run(blocked_mask(BatchLayout.of(layout), 0, 9, None)) - run(whole)
        ).abs().max() <= 1e-5


def test_the_name_is_known_to_transformers() -> None:
    assert transformers.AttentionInterface()[KEYS_BY_ROW] is attention
