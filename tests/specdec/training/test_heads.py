"""Heads in training: what they compute is what drafting computes with the written head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from assistant_heads import save_assistant
from checkpoints import save_tiny_checkpoint
from dflash2_heads import save_dflash2_head
from loaded_heads import load, run
from tiny_pair import VOCAB, save_model
from trained_heads import with_random_weights
from training import train_options

import specdec
from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions
from backends.heads.opened import open_head
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from specdec.training import dflash, repeated
from specdec.training.data import Batch
from specdec.training.dflash import DFlashDraft
from specdec.training.eagle3 import Eagle3Draft
from specdec.training.head import TargetHead
from specdec.training.loss import TopKTargets
from specdec.training.mtp import MtpDraft
from specdec.training.options import KINDS
from specdec.training.train import train_draft

OPTIONS = {"memory_budget": "2GiB", "ctx_size": 128, "exact": "on"}
REPEATED = {"mtp": MtpDraft, "eagle3": Eagle3Draft}
N_TOKENS = 12
TOLERANCE = 3e-4


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (repeated, dflash):
        monkeypatch.setattr(module, "in_bf16", lambda device: nullcontext())


def batch_of(token_ids: torch.Tensor, states: torch.Tensor) -> Batch:
    """Return windows whose next tokens are the target's likeliest ones."""
    n_windows, length = token_ids.shape
    places = torch.arange(n_windows).repeat_interleave(length)
    positions = torch.arange(length).repeat(n_windows)
    next_ids = token_ids.roll(-1, dims=1).flatten()[:, None]
    certain = torch.zeros(next_ids.shape)
    targets = TopKTargets(next_ids, certain, torch.full((len(next_ids),), -20.0))
    return Batch(token_ids, places, positions, targets, states.bfloat16())


def random_batch(draft: TargetHead, vocab_size: int, n_windows: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(0)
    width = len(draft.hidden_layers) * draft.hidden_size
    ids = torch.randint(3, vocab_size, (n_windows, N_TOKENS), generator=generator)
    return batch_of(ids, torch.randn(n_windows, N_TOKENS, width, generator=generator))


@contextmanager
def drafting(target: Path, draft: TargetHead, folder: Path) -> Iterator[TorchBackend]:
    """Write a head and load it as a run does."""
    folder.mkdir()
    draft.save(folder)
    source = HfSource(target, BackendOptions())
    head = open_head(folder, source, BackendOptions())
    assert head is not None
    with load(source) as owner:
        head.share_weights(owner)
        with load(head) as backend:
            yield backend


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_learns_and_drafts(target, text, tmp_path, kind) -> None:
    changes = {"epochs": 30.0, "learning_rate": 0.01} if kind == "dflash" else {}
    options = train_options(target, tmp_path / "head", kind=kind, text=text, **changes)
    report = train_draft(options)
    assert report.is_new
    assert report.after.agreement > report.before.agreement + 0.03
    with specdec.load(target, spec_type="none", **OPTIONS) as llm:
        expected = llm.generate("int char ", max_tokens=24).token_ids
    fixed = {"num_draft_tokens": 4, "draft_depth": 3}
    with specdec.load(target, tmp_path / "head", spec_type="draft", **fixed, **OPTIONS) as llm:
        output = llm.generate("int char ", max_tokens=24)
    assert output.token_ids == expected
    assert output.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_head_is_trained_further(target, text, tmp_path, kind) -> None:
    first = train_draft(train_options(target, tmp_path / "first", kind=kind, text=text, epochs=2.0))
    options = train_options(target, tmp_path / "then", draft=str(tmp_path / "first"), text=text)
    second = train_draft(options)
    assert not second.is_new
    assert second.before == first.after
    assert second.after.rank >= second.before.rank


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", REPEATED)
def test_steps_are_those_of_drafting(tmp_path, in_float32, kind, family) -> None:
    target = save_tiny_checkpoint(family, tmp_path / "target")
    draft = with_random_weights(REPEATED[kind](target, 96))
    batch = random_batch(draft, 96)
    with torch.no_grad():
        steps = [draft._output_head(states)[0] for states in draft._steps(batch, 3)]
    ids, states = batch.token_ids[0].tolist(), batch.hidden_states[0].float().numpy()
    with drafting(target, draft, tmp_path / "head") as head:
        for row in range(N_TOKENS - 3):
            sequence = head.new_sequence()
            output = run(head, sequence, ids[1 : row + 2], states[: row + 1])
            expected = [output.logits[-1]]
            parent = PREFIX
            for number in (2, 3):
                token = ids[row + number : row + number + 1]
                output = run(head, sequence, token, output.hidden_states[-1:], [parent])
                (parent,) = output.node_ids
                expected.append(output.logits[-1])
            sequence.close()
            actual = [step[row].numpy() for step in steps]
            np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blocks_are_those_of_drafting(tmp_path, in_float32, family) -> None:
    target = save_tiny_checkpoint(family, tmp_path / "target")
    draft = with_random_weights(DFlashDraft(target, 96))
    batch = random_batch(draft, 96)
    starts = torch.tensor([4, 1, 9])
    with torch.no_grad():
        hidden = draft._blocks(batch, starts, draft._context(batch))[0]
        actual = draft._output_head(hidden[:, 1:]).numpy()
    ids, states = batch.token_ids[0].tolist(), batch.hidden_states[0].float().numpy()
    block = draft._model.block
    with drafting(target, draft, tmp_path / "head") as head:
        for start, logits in zip(starts.tolist(), actual, strict=True):
            sequence = head.new_sequence()
            context = ids[:start]
            head.forward(
                [SequenceInput(sequence, context, logits_at=[], hidden_states=states[:start])]
            )
            first, size = sequence.next_node_id, block.size
            tokens = [ids[start]] + [block.mask_token_id] * (size - 1)
            parents = [PREFIX, *range(first, first + size - 1)]
            (output,) = head.forward([SequenceInput(sequence, tokens, parents, range(1, size))])
            sequence.close()
            np.testing.assert_allclose(logits, output.logits, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beside_each_other_are_computed_alone(target, in_float32, kind) -> None:
    """A batch gives the agreements of its windows one by one."""
    make = {**REPEATED, "dflash": DFlashDraft}[kind]
    draft = with_random_weights(make(target, VOCAB))
    both = random_batch(draft, VOCAB, 2)
    alone = [batch_of(both.token_ids[[i]], both.hidden_states[[i]]) for i in range(2)]
    expected = torch.cat([draft.agreements(batch, 4) for batch in alone], dim=1)
    assert torch.equal(draft.agreements(both, 4), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_a_text_by_heart(target, in_float32, monkeypatch, kind) -> None:
    """All steps agree in the end; losses alone would also fall with a wrong token or position."""
    monkeypatch.setattr(dflash, "_TOKENS_PER_BLOCK", 1)
    torch.manual_seed(0)
    make = {**REPEATED, "dflash": DFlashDraft}[kind]
    draft = make(target, VOCAB)
    batch = random_batch(draft, VOCAB, 2)
    optimizer = torch.optim.Adam(draft.module.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        draft.loss(batch).backward()
        optimizer.step()
    agrees = draft.agreements(batch, 3)
    for step in range(3):
        assert agrees[step, :, 1 : N_TOKENS - 1 - step].float().mean() > 0.9


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (6, [1, 2, 4]), (20, [1, 5, 9, 13, 18])],
)
def test_a_dflash_head_takes_layers_from_an_early_to_a_late_one(
    tmp_path, num_layers, expected
) -> None:
    target = save_model(tmp_path / "target", seed=1, num_hidden_layers=num_layers)
    draft = DFlashDraft(target, VOCAB)
    draft.save(tmp_path / "head")
    config = json.loads((tmp_path / "head/config.json").read_text(encoding="utf-8"))
    assert config["dflash_config"]["target_layer_ids"] == expected
    assert len(draft.hidden_layers) == len(expected)


def test_eagle3_takes_three_states(tmp_path) -> None:
    target = save_model(tmp_path / "target", seed=1, num_hidden_layers=2)
    with pytest.raises(specdec.SpecdecError, match="has 2 layers, and an EAGLE-3 head takes"):
        Eagle3Draft(target, VOCAB)


def test_an_eagle3_head_is_not_trained_further(target, text, tmp_path) -> None:
    Eagle3Draft(target, VOCAB).save(tmp_path)
    options = train_options(target, tmp_path / "out", draft=str(tmp_path), text=text)
    with pytest.raises(specdec.SpecdecError, match=r"EAGLE-3 head, which is not trained further"):
        train_draft(options)


def test_dflash2_heads_and_assistants_are_not_trained(target, text, tmp_path) -> None:
    heads = {
        "a DFlash 2 head, which is not trained": save_dflash2_head(tmp_path / "dflash2"),
        "a Gemma 4 assistant, which is not trained": save_assistant(tmp_path / "assistant"),
    }
    for reason, head in heads.items():
        options = train_options(target, tmp_path / "out", draft=str(head), text=text)
        with pytest.raises(specdec.SpecdecError, match=reason):
            train_draft(options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_may_have_fewer_neurons(target, tmp_path, kind, text) -> None:
    options = train_options(
        target, tmp_path / "head", kind=kind, text=text, epochs=1.0, intermediate_size=8
    )
    train_draft(options)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["intermediate_size"] == 8
    with specdec.load(target, tmp_path / "head", spec_type="draft", **OPTIONS) as llm:
        assert llm.generate("int char ", max_tokens=4).token_ids
