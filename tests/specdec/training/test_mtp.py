"""Training of MTP heads, and the folders that they are written to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mtp_heads import save_with_mtp_head
from tiny_pair import VOCAB, save_model, save_tokenizer
from training import train_options, weights_of

import specdec
from specdec.training.mtp import MtpDraft
from specdec.training.train import train_draft

OPTIONS = {"memory_budget": "2GiB", "ctx_size": 128, "exact": "on"}


@pytest.fixture(scope="module")
def with_own_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    save_with_mtp_head("qwen3.5", directory, vocab_size=VOCAB)
    save_tokenizer(directory)
    return directory


def expect_text(target: Path, head: Path) -> None:
    with specdec.load(target, spec_type="none", **OPTIONS) as llm:
        expected = llm.generate("int char ", max_tokens=12).token_ids
    with specdec.load(target, head, spec_type="draft", **OPTIONS) as llm:
        assert llm.generate("int char ", max_tokens=12).token_ids == expected


def test_a_new_head_learns_and_drafts(target, text, tmp_path) -> None:
    report = train_draft(train_options(target, tmp_path / "head", kind="mtp", text=text))
    assert report.is_new
    assert report.after.agreement > report.before.agreement + 0.03
    names = set(weights_of(tmp_path / "head"))
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < names
    assert all(name.startswith("mtp.") for name in names)
    expect_text(target, tmp_path / "head")


def test_the_targets_own_head_is_where_training_begins(with_own_head, text, tmp_path) -> None:
    report = train_draft(train_options(with_own_head, tmp_path / "head", kind="mtp", text=text))
    assert not report.is_new
    assert report.after.rank >= report.before.rank
    expect_text(with_own_head, tmp_path / "head")


def test_a_head_is_written_as_it_is_read(with_own_head, tmp_path) -> None:
    from safetensors.torch import load_file

    MtpDraft(with_own_head, VOCAB).save(tmp_path)
    expected = load_file(with_own_head / "model-mtp.safetensors")
    actual = weights_of(tmp_path)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_heads_of_traces_get_hidden_states_from_the_target(target, tmp_path) -> None:
    options = {"memory_budget": "2GiB", "ctx_size": 256}
    with specdec.load(target, record_traces=tmp_path / "traces", **options) as llm:
        for seed in range(12):
            llm.generate("int x", max_tokens=90, temperature=1.0, seed=seed, ignore_eos=True)
    trained = train_options(target, tmp_path / "head", kind="mtp", traces=tmp_path / "traces")
    assert train_draft(trained).after.agreement > 0


@pytest.mark.parametrize("change", ["hidden_size", "vocab_size"])
def test_a_head_of_another_target_is_refused(target, tmp_path, change) -> None:
    draft = MtpDraft(target, VOCAB)
    draft.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, change: 7}))
    with pytest.raises(specdec.SpecdecError, match=f"for a target with {change} 7, this one has"):
        specdec.load(target, tmp_path)


def test_a_head_is_no_model(target, tmp_path) -> None:
    MtpDraft(target, VOCAB).save(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(specdec.SpecdecError, match="draft head"):
        specdec.load(tmp_path)


def test_a_head_without_a_tensor_is_refused(target, tmp_path) -> None:
    from safetensors.torch import save_file

    MtpDraft(target, VOCAB).save(tmp_path)
    tensors = weights_of(tmp_path)
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(specdec.SpecdecError, match="lacks 1 tensors"):
        specdec.load(target, tmp_path)


def test_gguf_targets_have_no_such_heads(target, tmp_path) -> None:
    MtpDraft(target, VOCAB).save(tmp_path)
    with pytest.raises(specdec.SpecdecError, match="drafts for checkpoints alone"):
        specdec.load("pair:target.gguf", tmp_path)


def test_sequences_beside_each_other_are_computed_alone(target) -> None:
    """A batch gives the losses and agreements of its windows one by one."""
    from specdec.training.data import Batch
    from specdec.training.loss import TopKTargets

    draft = MtpDraft(target, VOCAB)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 10), generator=generator)
    states = torch.randn(2, 10, draft.hidden_size, generator=generator).bfloat16()
    top = torch.randint(0, VOCAB, (20, 4), generator=generator)
    logprobs = torch.full((20, 4), -1.6)

    def batch(windows: list[int]) -> Batch:
        chosen = torch.cat([torch.arange(10) + 10 * w for w in windows])
        of = TopKTargets(top[chosen], logprobs[chosen], torch.full((len(chosen),), -1.6))
        places = torch.arange(len(windows)).repeat_interleave(10)
        positions = torch.arange(10).repeat(len(windows))
        return Batch(ids[windows], places, positions, of, states[windows])

    losses = [draft.loss(batch([i])) for i in range(2)]
    torch.testing.assert_close(draft.loss(batch([0, 1])), torch.stack(losses).mean())
    alone = torch.cat([draft.agreements(batch([i]), 4) for i in range(2)], dim=1)
    assert torch.equal(draft.agreements(batch([0, 1]), 4), alone)


def test_kinds_of_models_that_cannot_have_one(tmp_path) -> None:
    gemma = save_model(tmp_path / "scaled", seed=1)
    config = json.loads((gemma / "config.json").read_text())
    (gemma / "config.json").write_text(json.dumps({**config, "logit_scale": 0.5}))
    with pytest.raises(specdec.SpecdecError, match="scales its logits"):
        MtpDraft(gemma, VOCAB)
