"""Draft heads in files of their own: what `specdec check` says of them, and as targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dflash_heads import save_dflash_head
from eagle3_heads import N_LAYERS, bigram_head, bigram_target, save_gguf_head, save_specforge
from tiny_pair import save_tokenizer

import specdec
from specdec.cli.app import main

VOCAB = 280  # the tokenizer has 259 tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = bigram_target(tmp_path_factory.mktemp("target"), VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    eagle3 = bigram_head(target, 64)
    sizes = {"vocab_size": VOCAB, "num_target_layers": N_LAYERS}
    return {
        "an EAGLE-3 head": save_specforge(eagle3, folder / "eagle3"),
        "a DFlash head": save_dflash_head(folder / "dflash", **sizes),
    }


@pytest.mark.parametrize("kind", ["an EAGLE-3 head", "a DFlash head"])
def test_check_says_what_it_is_and_how_it_is_used(
    kind: str, target: Path, heads: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", str(target), "-md", str(heads[kind])]
    assert main(["check", *words]) == 0
    out = capsys.readouterr().out
    assert kind in out
    assert " ".join(words) in out
    assert main(["check", *words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["compatible"] is True
    assert value["head"] in ("eagle3", "dflash")
    assert value["target_tokens"] == VOCAB


@pytest.mark.gguf
def test_check_knows_a_dflash_head_in_a_gguf_file(
    target: Path, heads: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    from dflash_gguf import save_dflash_gguf

    head = str(save_dflash_gguf(heads["a DFlash head"], tmp_path / "head.gguf"))
    assert main(["check", "-m", str(target), "-md", head]) == 0
    assert "a DFlash head, layers: 2" in capsys.readouterr().out
    assert main(["run", "-m", head, "-p", "a"]) == 2
    assert "a DFlash head, a draft head, which runs only beside its target" in (
        capsys.readouterr().err
    )
    assert main(["train-draft", "-m", str(target), "--from", head, "--text", __file__, "-o", "d"])
    assert "is a GGUF file, and heads are trained in safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pair:target", "pair:target.gguf"])
def test_check_finds_that_a_target_has_no_head(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("gguf"):
        pytest.importorskip("llama_cpp")
    assert main(["check", "-m", name, "-md", "mtp"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "has no MTP head" in err
    assert err.count("\n") == 1


def test_check_finds_the_targets_own_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-m", "pair:hybrid", "-md", "mtp"]) == 0
    out = capsys.readouterr().out
    assert "an MTP head, the target's own, layers: 1" in out
    assert "another model" not in out


def test_check_compares_no_draft_that_is_yet_to_be_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "-m", "pair:target", "-md", "auto"]) == 2
    assert "specdec plan -m pair:target -md auto" in capsys.readouterr().err


def test_check_finds_the_head_of_another_target(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = save_dflash_head(tmp_path / "wide", hidden_size=64, vocab_size=VOCAB)
    capsys.readouterr()  # progress of transformers
    assert main(["check", "-m", str(target), "-md", str(wide)]) == 2
    err = capsys.readouterr().err
    assert "head of another target" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["an EAGLE-3 head", "a DFlash head"])
@pytest.mark.parametrize("command", [["run", "-p", "x"], ["check", "-md", "pair:draft"], ["plan"]])
def test_a_head_as_the_target_is_told_how_it_is_used(
    kind: str, command: list[str], heads: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "-m", str(heads[kind])]) == 2
    err = capsys.readouterr().err
    assert f"is {kind}" in err
    assert "target with -m, and this head with -md" in err
    assert err.count("\n") == 1


@pytest.mark.gguf
def test_a_gguf_head_as_the_target(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    head = save_gguf_head(bigram_head(target, 64), tmp_path / "head.gguf")
    with pytest.raises(specdec.SpecdecError, match="an EAGLE-3 head.* this head with -md"):
        specdec.load(head)
