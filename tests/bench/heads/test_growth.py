"""A grown draft head proposes what the small target's head does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB, save_tiny_checkpoint
from eagle3_heads import N_LAYERS, new_head, save_specforge, save_speculators
from trained_heads import with_random_weights

from backends.contract.backend import PREFIX, Backend
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions, Loading
from backends.heads.opened import open_head
from backends.hf.source import HfSource
from bench.heads.growth import grow_head
from bench.synth.checkpoint import grow
from bench.synth.shapes import SynthError
from bench.synth.source import SourceModel
from offload.placement.placement import Placement
from offload.placement.plan import pin_all
from specdec.training.dflash import DFlashDraft
from specdec.training.eagle3 import Eagle3Draft
from specdec.training.mtp import MtpDraft

PROMPT = [5, 17, 80, 33, 9, 61, 12, 44]
SIZES = {"max_context": 64, "max_nodes": 16, "max_num_tokens": 16, "load_mode": "ram"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    return save_tiny_checkpoint("llama", directory, num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def grown(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(
        SourceModel(small).shape,
        hidden_size=96,
        n_layers=9,
        n_heads=12,
        n_kv_heads=4,
        intermediate_size=80,
        vocab_size=120,
    )
    folder = tmp_path_factory.mktemp("large") / "grown"
    grow(small, folder, shape, dtype="fp32")
    return folder


@contextmanager
def loaded(target: Path, head: Path) -> Iterator[tuple[Backend, Backend]]:
    source = HfSource(target, BackendOptions(n_threads=1))
    own = open_head(head, source, BackendOptions(n_threads=1))
    placed = Placement(pin_all(source.layers), 0)
    with source.load(Loading(placed, **SIZES)) as backend:
        own.share_weights(backend)
        with own.load(Loading(Placement(pin_all(own.layers), 0), **SIZES)) as drafting:
            yield backend, drafting


def proposed(target: Path, head: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the head's logits after the prompt and after one node below it."""
    with loaded(target, head) as (backend, drafting):
        context = PROMPT[:-1]
        at = range(len(context))
        chunk = SequenceInput(backend.new_sequence(), context, hidden_states_at=at)
        states = backend.forward([chunk])[0].hidden_states
        kv, last = drafting.new_sequence(), [len(context) - 1]
        first = drafting.forward([SequenceInput(kv, PROMPT[1:], None, last, last, states)])[0]
        node = SequenceInput(kv, [7], [PREFIX], [0], [0], first.hidden_states)
        return first.logits[0], drafting.forward([node])[0].logits[0]


def marginals(target: Path, head: Path) -> np.ndarray:
    """Return a DFlash head's logits of a block after the prompt."""
    with loaded(target, head) as (backend, drafting):
        context = PROMPT[:-1]
        at = range(len(context))
        chunk = SequenceInput(backend.new_sequence(), context, hidden_states_at=at)
        states = backend.forward([chunk])[0].hidden_states
        kv, block = drafting.new_sequence(), drafting.masked_block
        drafting.forward([SequenceInput(kv, context, logits_at=[], hidden_states=states)])
        first, masks = kv.next_node_id, [block.mask_token_id] * (block.size - 1)
        parents = [PREFIX, *range(first, first + block.size - 1)]
        tokens = [PROMPT[-1], *masks]
        chunk = SequenceInput(kv, tokens, parents, range(1, block.size))
        return drafting.forward([chunk])[0].logits


@pytest.mark.parametrize("save", [save_specforge, save_speculators])
def test_proposals_are_the_small_heads(small, grown, tmp_path, save):
    head = save(new_head(), tmp_path / "head")
    out = tmp_path / "grown-head"
    grow_head(head, small, grown, out)
    for expected, actual in zip(proposed(small, head), proposed(grown, out), strict=True):
        np.testing.assert_allclose(actual[: len(expected)], expected, atol=2e-4)


KINDS = {"mtp": MtpDraft, "eagle3": Eagle3Draft, "dflash": DFlashDraft}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_train_draft_can_be_grown(small, grown, tmp_path, kind):
    """With states of the last layer, after which the grown target has layers that add nothing."""
    draft = with_random_weights(KINDS[kind](small, VOCAB, intermediate_size=24))
    (tmp_path / "head").mkdir()
    draft.save(tmp_path / "head")
    out = tmp_path / "grown-head"
    grow_head(tmp_path / "head", small, grown, out)
    propose = marginals if kind == "dflash" else proposed
    for expected, actual in zip(
        propose(small, tmp_path / "head"), propose(grown, out), strict=True
    ):
        np.testing.assert_allclose(actual[: len(expected)], expected, atol=2e-4)


def test_heads_that_cannot_be_grown_are_refused(small, grown, tmp_path):
    head = save_specforge(new_head("norm_before_fc"), tmp_path / "head")
    with pytest.raises(SynthError, match="a norm of 96 numbers cannot be grown"):
        grow_head(head, small, grown, tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(SynthError, match="exists: name a new folder"):
        grow_head(head, small, grown, tmp_path / "there")
