"""Models of the hub's cache: drafts found there, and removing them."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import gguf_bytes as gb
import huggingface_hub.constants
import pytest
from assistant_heads import save_assistant
from checkpoint_gguf import save_checkpoint_gguf
from checkpoints import save_tiny_checkpoint
from dflash_gguf import save_dflash_gguf
from dflash_heads import save_dflash_head
from eagle3_heads import N_LAYERS, new_head, save_gguf_head, save_specforge
from tiny_gguf import save_tiny_architecture
from tiny_pair import save_model, save_tokenizer

import specdec
from specdec.cli.app import main
from specdec.models.downloads import draft_to_download
from specdec.models.drafts import draft_candidates, drafts_for
from specdec.models.eval_results import EvalResults, write_eval_results
from specdec.models.local_models import local_models
from specdec.models.names import MTP_HEAD, resolve_model
from specdec.models.weight_files import weights_fingerprint


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a user without other models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def drafts(target: object, *, takes_heads: bool = True) -> list[str | None]:
    """Return the names of a target's candidates, n-grams (None) among them."""
    return [item.name for item in draft_candidates(str(target), takes_heads=takes_heads)]


def add(hub: Path, name: str, model: Path) -> None:
    """Add a file as the hub's client does: snapshots link to blobs."""
    repo = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, repo / "blobs")
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in (repo / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)


def test_the_embedded_draft_drafts_for_the_embedded_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert drafts("pair:target") == [None, "pair:mtp", "pair:dflash", "pair:draft"]
    assert drafts("pair:target", takes_heads=False) == [None, "pair:draft"]
    arguments = ["run", "-m", "pair:target", "-md", "auto", "-p", "def f():", "-n", "2"]
    assert main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "expected" in line]
    assert re.search(r"note: (the draft is pair:\w+|n-grams draft): .*; [0-9.e+]+ tokens/s", line)
    assert all(name in line for name in ("pair:mtp", "pair:dflash", "pair:draft", "n-grams"))


def test_every_gguf_model_of_a_repository_is_listed_by_a_name_that_m_takes(hub: Path) -> None:
    """A repository of several used to be listed by a name that -m refused."""
    model = hub.parent / "several"
    model.mkdir()
    parts = [f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in ("tiny-Q4_0.gguf", *parts):
        (model / name).write_bytes(gb.gguf())
    add(hub, "me/several", model)
    actual = {item.name: item.n_bytes for item in local_models()}
    n_bytes = len(gb.gguf())
    assert actual == {
        "me/several:big-Q8_0-00001-of-00002.gguf": 2 * n_bytes,
        "me/several:tiny-Q4_0.gguf": n_bytes,
    }
    for name in actual:
        assert resolve_model(name).name == name.partition(":")[2]


def test_the_largest_of_a_quarter_is_taken(hub: Path) -> None:
    add(hub, "me/draft", resolve_model("pair:draft"))
    add(hub, "me/same", resolve_model("pair:target"))
    add(hub, "me/other", save_model(hub.parent / "tiny", seed=1))
    fitting = drafts_for("pair:target", local_models())
    assert [item.name for item in fitting] == ["pair:draft", "me/draft", "me/same"]
    assert drafts("pair:target", takes_heads=False) == [None, "pair:draft", "me/draft"]


def test_a_target_whose_vocabulary_no_model_has(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said that there are no models here at all."""
    target = save_model(hub.parent / "tiny", seed=1)
    for number in range(6):
        add(hub, f"me/other-{number}", resolve_model("pair:draft"))
    assert main(["models", "--fits", str(target)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"no model here has the vocabulary of {target} (compared: pair:draft, ")
    assert re.search(r"me/other-\d and 2 more\): download a smaller llama", out)


def test_a_target_without_a_draft(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_model(hub.parent / "tiny", seed=1)
    with specdec.load(target, "auto") as llm:
        assert llm.generate([5, 6, 7], max_tokens=3).token_ids
    capsys.readouterr()
    assert main(["plan", "-m", str(target), "-md", "auto"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "n-grams draft" in line]
    assert "download a smaller llama with the same tokenizer" in line


def test_a_targets_own_head_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts("pair:hybrid") == [None, MTP_HEAD]
    arguments = ["run", "-m", "pair:hybrid", "-md", "auto", "--spec-type", "draft"]
    assert main([*arguments, "-p", "def f():", "-n", "2"]) == 0
    assert "the draft is mtp: pair:hybrid has an MTP head of its own" in capsys.readouterr().err


def test_a_head_on_this_machine_is_taken(hub: Path) -> None:
    head = save_specforge(new_head(vocab_size=259, n_draft=200), hub.parent / "head")
    add(hub, "me/head", head)
    sizes = {"hidden_size": 32, "vocab_size": 259, "num_hidden_layers": N_LAYERS}
    fitting = save_model(hub.parent / "fitting", seed=1, **sizes)
    other = save_model(hub.parent / "wider", seed=1, **sizes | {"hidden_size": 64})
    assert drafts(fitting) == [None, "me/head"]
    assert drafts(fitting, takes_heads=False) == [None]
    assert drafts(other) == [None]
    with specdec.load(fitting, "auto") as llm:
        assert llm.generate([5, 6, 7], max_tokens=3).token_ids


def test_an_assistant_on_this_machine_is_taken(hub: Path) -> None:
    add(hub, "me/assistant", save_assistant(hub.parent / "head", vocab_size=259))
    sizes = {"vocab_size": 259, "vocab_size_per_layer_input": 259}
    fitting = save_tiny_checkpoint("gemma4", hub.parent / "fitting", **sizes)
    save_tokenizer(fitting)
    other = save_model(hub.parent / "llama", seed=1, hidden_size=32, vocab_size=259)
    assert drafts(fitting) == [None, "me/assistant"]
    *_, item = draft_candidates(str(fitting))
    assert item.description == f"a Gemma 4 assistant here that has the sizes of {fitting}"
    assert drafts(fitting, takes_heads=False) == [None]
    assert drafts(other) == [None]
    with specdec.load(fitting, "auto") as llm:
        assert llm.generate([5, 6, 7], max_tokens=3).token_ids


@pytest.mark.gguf
def test_a_head_on_this_machine_is_taken_for_a_gguf_target(hub: Path) -> None:
    pytest.importorskip("gguf")
    folder = hub.parent / "checkpoint"
    save_tiny_checkpoint("llama", folder, num_hidden_layers=N_LAYERS, hidden_size=32)
    target = save_checkpoint_gguf(folder, hub.parent / "target.gguf")
    assert drafts(target) == [None]
    in_folder = hub.parent / "head"
    in_folder.mkdir()
    save_gguf_head(new_head(), in_folder / "head.gguf")
    add(hub, "me/eagle", in_folder)
    *_, choice = draft_candidates(str(target))
    assert choice.name == "me/eagle:head.gguf"
    assert choice.description.startswith("an EAGLE-3 head here")
    add(hub, "me/wide", save_dflash_head(hub.parent / "wide", num_target_layers=3, hidden_size=64))
    assert drafts(target) == [None, choice.name]
    options = {"num_target_layers": N_LAYERS, "target_layer_ids": [1, 3]}
    flash = save_dflash_head(hub.parent / "flash", **options)
    flash_file = hub.parent / "flash-file"
    flash_file.mkdir()
    save_dflash_gguf(flash, flash_file / "head.gguf")
    add(hub, "me/fast", flash_file)
    assert drafts(target) == [None, choice.name, "me/fast:head.gguf"]
    results = EvalResults(0.5, 2.0, 8, 100, (), "target", "another's")
    write_eval_results(flash, results)
    add(hub, "me/flash", flash)
    assert drafts(target) == [None, choice.name, "me/fast:head.gguf"]
    results = replace(results, target_fingerprint=weights_fingerprint(target))
    write_eval_results(flash, results)
    add(hub, "me/better", flash)
    assert set(drafts(target)) == {None, choice.name, "me/better"}  # evaluated with this target
    for name, tokens_per_pass in (("me/a-worse", 1.5), ("me/z-worse", 1.9)):
        write_eval_results(flash, replace(results, tokens_per_pass=tokens_per_pass))
        add(hub, name, flash)
        assert set(drafts(target)) == {None, choice.name, "me/better"}
    write_eval_results(flash, replace(results, tokens_per_pass=2.5))
    add(hub, "me/best", flash)
    assert set(drafts(target)) == {None, choice.name, "me/best"}
    assert drafts(target, takes_heads=False) == [None]
    several = save_tiny_architecture("gemma3n", hub.parent / "several.gguf")
    assert drafts(several) == [None]
    with specdec.load(target, "auto", ctx_size=64, threads=1) as llm:
        assert llm.generate([5, 6, 7], max_tokens=3).token_ids


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llama", "vocab_size": 128256}, "meta-llama/Llama-3.2-1B-Instruct"),
        ({"model_type": "llama", "vocab_size": 32000}, "TinyLlama"),
        ({"model_type": "llama", "vocab_size": 5}, "a smaller llama"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "a smaller"),
        ({"text_config": {"model_type": "gemma4_text", "vocab_size": 262144}}, "the assistant"),
        ({"text_config": {"model_type": "qwen3_5_text", "vocab_size": 248320}}, "its MTP head"),
    ],
)
def test_advice_goes_by_architecture(tmp_path: Path, config: dict, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert name in draft_to_download(tmp_path)


def test_pull_says_where_it_is(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(hub, "me/draft", resolve_model("pair:draft"))
    assert main(["pull", "me/draft"]) == 0
    assert capsys.readouterr().out.strip() == str(resolve_model("me/draft"))
    assert main(["pull", "me/none"]) == 2
    assert main(["pull", "pair:draft"]) == 2
    assert "on this disk already" in capsys.readouterr().err


def test_rm(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = {"me/draft", *(f"me/kept-{i}" for i in range(8))}  # with the same commits
    for name in sorted(copies):
        add(hub, name, resolve_model("pair:draft"))
    assert main(["rm", "me/draft", "--yes"]) == 0
    assert {model.name for model in local_models()} == copies - {"me/draft"}
    assert not (hub / "models--me--draft").exists()
    assert "are free again" in capsys.readouterr().out
    assert main(["rm", "me/draft", "--yes"]) == 2
    assert main(["rm", "ollama:tiny", "--yes"]) == 2
    assert "ollama rm tiny" in capsys.readouterr().err
    assert main(["rm", "pair:target", "--yes"]) == 2
    assert "pair:target comes with specdec" in capsys.readouterr().err
    assert main(["rm", "me/kept-0:a.gguf", "--yes"]) == 2
    assert "`specdec rm me/kept-0`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "code", "expected"),
    [
        ("n\n", 0, "me/draft is kept"),
        ("\n", 0, "me/draft is kept"),
        ("", 2, "there is no terminal to ask at: pass --yes"),
    ],
)
def test_rm_asks(
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
    expected: str,
) -> None:
    add(hub, "me/draft", resolve_model("pair:draft"))
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["rm", "me/draft"]) == code
    assert expected in capsys.readouterr().err
    assert [model.name for model in local_models()] == ["me/draft"]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["rm", "me/draft"]) == 0
    assert local_models() == []
