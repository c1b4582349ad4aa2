"""The pair's trainer: corpus rules, token streams, schedules and the draft's first embedding."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.train.corpus import (
    Corpus,
    collect,
    documented_functions,
    is_ordinary_source,
    is_permissive,
    licence_of,
    strip_header,
)
from bench.train.data import (
    END_OF_TEXT,
    WindowSampler,
    encode,
    mixed_documents,
    save_tokenizer,
    train_tokenizer,
)
from bench.train.distil import opening_prompts, project_embedding
from bench.train.model import build_model, draft_config, next_token_loss, target_config
from bench.train.trainer import Phase, Trainer, TrainOptions, build_optimizers

SOURCE = '''"""A module."""


def add(first: int, second: int) -> int:
    """Return the sum of two numbers."""
    total = first + second
    return total


def quiet(value):
    return value
'''


class FakeDistribution:
    """Only the members that `licence_of` reads."""

    def __init__(self, **fields: str) -> None:
        self.metadata = Message()
        for name, value in fields.items():
            self.metadata[name.replace("_", "-")] = value


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("BSD-3-Clause", True),
        ("Python Software Foundation License", True),
        ("MPL-2.0 AND MIT", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("Submitted to the committee", False),
        ("not stated", False),
    ],
)
def test_only_permissive_licences_are_read(licence: str, permissive: bool) -> None:
    assert is_permissive(licence) is permissive


def test_the_licence_expression_comes_before_classifiers() -> None:
    both = FakeDistribution(
        License_Expression="MPL-2.0", Classifier="License :: OSI Approved :: MIT License"
    )
    assert licence_of(both) == "MPL-2.0"
    assert licence_of(FakeDistribution(License="BSD\n\nCopyright ...")) == "BSD"
    assert licence_of(FakeDistribution()) == "not stated"


@pytest.mark.parametrize(
    "text",
    [
        "# This file was automatically generated\n" + SOURCE,
        SOURCE + "TABLE = [" + "0x1f, 0x2e, " * 400 + "]\n",
        SOURCE.replace("add", "has_close_elements"),  # a benchmark's problem
        "VALUE = 1\n",
        "",
    ],
)
def test_generated_files_tables_and_benchmarks_are_left_out(text: str) -> None:
    assert not is_ordinary_source(text)


def test_ordinary_source_is_taken_without_its_header() -> None:
    assert is_ordinary_source(SOURCE)
    assert strip_header("#!/usr/bin/python\n# Licence ...\n\n" + SOURCE) == SOURCE
    assert [f.splitlines()[0] for f in documented_functions(SOURCE)] == [
        "def add(first: int, second: int) -> int:"
    ]


def test_a_corpus_names_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdlib = tmp_path / "stdlib"
    (stdlib / "tests").mkdir(parents=True)
    for path in (stdlib / "adding.py", stdlib / "tests" / "adding.py"):
        path.write_text(SOURCE + f"# {path.parent.name}\n" * 20)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(stdlib)})
    for name, licence in (("good", "MIT"), ("bad", "GPL-3.0-only")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
        )
        (info / "RECORD").write_text(f"{name}.py,,\ncopy/{name}.py,,\ntests/{name}.py,,\n")
        for folder in (".", "copy", "tests"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.py").write_text(SOURCE + f"# {name}\n" * 20)
    corpus: Corpus = collect([tmp_path], cap_bytes=200_000)
    assert [(s.name, s.n_files) for s in corpus.sources] == [
        ("python-stdlib", 1),
        ("good", 1),  # a duplicate copy; tests are skipped
    ]
    assert corpus.refused == ["bad 1.0: GPL-3.0-only"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE] * 3, vocab_size=300)


def test_the_tokenizer_round_trips_and_loads_in_transformers(tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def fö(x):\n\t  return  'naïve 漢字'   # 1234\n\n"
    ids = loaded(text)["input_ids"]
    assert loaded.decode(ids) == text
    assert ids == tokenizer.encode(text).ids  # no bos is added
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.token_to_id(END_OF_TEXT)
    assert len(loaded) == tokenizer.get_vocab_size()


def test_windows_are_visited_once_an_epoch_and_a_resumed_run_goes_on() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    sampler = WindowSampler(stream, seed=3)
    first = sampler.next_batch(98, 10)  # one epoch
    assert first.shape == (98, 11)
    assert (first[:, 1:] == first[:, :-1] + 1).all()
    assert len(set((first[:, 0] // 10).tolist())) > 85  # jitter moves some to a neighbour
    seen = sampler.tokens_seen
    expected = sampler.next_batch(4, 10)
    resumed = WindowSampler(stream, seed=3, tokens_seen=seen)
    assert torch.equal(resumed.next_batch(4, 10), expected)


def test_documents_are_mixed_and_separated(tokenizer) -> None:
    documents = mixed_documents([SOURCE] * 10, list(documented_functions(SOURCE)) * 50, seed=1)
    assert documents == mixed_documents(
        [SOURCE] * 10, list(documented_functions(SOURCE)) * 50, seed=1
    )
    stream = encode(tokenizer, documents)
    separator = tokenizer.token_to_id(END_OF_TEXT)
    assert (stream == separator).sum() == len(documents) > 10
    prompts = opening_prompts(stream, separator, 5, seed=0, n_tokens=8)
    assert prompts.shape == (5, 8)
    assert (prompts[:, 0] == separator).all()
    assert not (prompts[:, 1:] == separator).any()


def test_rates_warm_up_stay_and_fall() -> None:
    options = TrainOptions(minutes=1, phases=(Phase(0.5, 2, 8), Phase(1.0, 1, 16)))
    assert options.lr_scale(0, 0.0) == pytest.approx(1 / options.warmup_steps)
    assert options.lr_scale(1000, 0.4) == 1.0
    assert options.lr_scale(1000, 0.75) == pytest.approx(0.5)
    assert options.lr_scale(1000, 1.0) == pytest.approx(0.01)
    assert [options.phase(p).length for p in (0.0, 0.49, 0.5, 1.5)] == [8, 8, 16, 16]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_training_lowers_the_loss_and_resumes(tokenizer, tmp_path: Path) -> None:
    model = build_model(draft_config(tokenizer), seed=0)
    stream = encode(tokenizer, [SOURCE] * 20)
    before = next_token_loss(model, WindowSampler(stream, 1).next_batch(4, 32)).item()

    def train(minutes: float):
        options = TrainOptions(minutes, (Phase(1.0, 4, 32),), warmup_steps=1)
        sampler = WindowSampler(stream, 1)
        loss = lambda ids: next_token_loss(model, ids)  # noqa: E731
        return Trainer("tiny", model, loss, sampler, options, tmp_path).run()

    first = train(0.006)
    after = next_token_loss(model, WindowSampler(stream, 1).next_batch(4, 32)).item()
    assert after < before
    again = train(0.006)  # its time is already used up
    assert again.step == first.step > 0


def test_without_muon_every_weight_is_adamws(tokenizer) -> None:
    model = build_model(draft_config(tokenizer), seed=0)
    (adamw,) = build_optimizers(model, TrainOptions(1, (Phase(1.0, 4, 32),), muon_lr=None))
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["params"] == list(model.parameters())


def test_the_projected_embedding_keeps_the_logit_geometry(tokenizer) -> None:
    target = build_model(target_config(tokenizer), seed=0)
    draft = build_model(draft_config(tokenizer), seed=1)
    table = target.get_input_embeddings().weight
    with torch.no_grad():  # a table of a rank that fits the draft
        table.copy_(torch.randn(len(table), 200) @ torch.randn(200, table.shape[1]) / 20)
    project_embedding(target, draft)
    small = draft.get_input_embeddings().weight
    torch.testing.assert_close(small @ small.T, table @ table.T, atol=1e-2, rtol=1e-2)
    assert small is draft.lm_head.weight
