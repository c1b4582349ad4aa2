"""Models downloaded by other programs on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf_bytes as gb
import pytest
from tiny_pair import save_model

from specdec.cli.app import main
from specdec.models.local_models import local_models
from specdec.models.names import ModelNotFound, resolve_model

FILE = gb.gguf()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user without models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "XDG_CACHE_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def add_to_ollama(home: Path, place: str) -> Path:
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:1"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    blob = root / "blobs" / "sha256-abc"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(FILE)
    return blob


def of(keeper: str) -> list[tuple[str, int]]:
    return [(model.name, model.n_bytes) for model in local_models() if model.keeper == keeper]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/library/tiny/latest", "ollama:tiny:latest"),
        ("registry.ollama.ai/me/tiny/1b", "ollama:me/tiny:1b"),
        ("hf.co/me/tiny/Q4", "ollama:hf.co/me/tiny:Q4"),
    ],
)
def test_ollamas_models(home: Path, place: str, name: str) -> None:
    blob = add_to_ollama(home, place)
    assert of("Ollama") == [(name, len(FILE))]
    assert resolve_model(name) == blob
    if name.endswith(":latest"):
        assert resolve_model(name.removesuffix(":latest")) == blob


@pytest.mark.parametrize(
    "name", ["", "other", "tiny:other", "../../etc", "a/../tiny", "tiny:..", "tiny:../tiny/latest"]
)
def test_what_ollama_does_not_have(home: Path, name: str) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/tiny/latest")
    with pytest.raises(ModelNotFound, match="Ollama has no model"):
        resolve_model(f"ollama:{name}")


def test_a_manifest_that_leads_elsewhere(home: Path) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/tiny/latest")
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest"
    manifest.write_text(manifest.read_text().replace("sha256:abc", "../../../../secret"))
    (home / "secret").write_bytes(FILE)
    with pytest.raises(ModelNotFound):
        resolve_model("ollama:tiny")
    assert of("Ollama") == []


def test_folders_of_programs_and_ones_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(home / "mine" / "tiny", seed=1)
    shutil.copytree(model, home / "mine" / "other")
    for place in (".lmstudio/models/me/it/a.gguf", ".cache/llama.cpp/b.gguf"):
        (home / place).parent.mkdir(parents=True)
        (home / place).write_bytes(FILE)
    assert main(["models", str(home / "mine"), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)["models"]
    keepers = [item["keeper"] for item in actual if item["keeper"] != "Hugging Face"]
    assert keepers == ["LM Studio", "llama.cpp", "folder", "folder"]
    assert main(["models", str(home / "mine"), "--fits", str(model)]) == 0
    out, err = capsys.readouterr()
    assert str(home / "mine" / "other") in out
    assert "tiny  " not in out
    assert "a.gguf is left out" in err


def test_the_embedded_draft_fits_the_embedded_target(capsys: pytest.CaptureFixture[str]) -> None:
    """`-md auto` would choose it, though it was missing in the list."""
    for target, is_listed in (("pair:target", True), ("pair:draft", False)):
        assert main(["models", "--fits", target, "--json"]) == 0
        actual = json.loads(capsys.readouterr().out)["models"]
        assert ("pair:draft" in [item["name"] for item in actual]) is is_listed


def test_a_file_without_a_whole_header_is_not_listed(home: Path) -> None:
    """As an empty one, one of another program, and one that is still being downloaded."""
    whole = gb.make_file(gb.model_metadata(), gb.model_tensors())
    contents = {"empty": b"", "random": bytes(range(99)), "cut": whole[:-1], "head": whole[:40]}
    (home / "mine").mkdir()
    for name, content in {**contents, "whole": whole}.items():
        (home / "mine" / f"{name}.gguf").write_bytes(content)
    assert [Path(model.name).stem for model in local_models(home / "mine")] == ["whole"]


def test_a_split_model_is_one(home: Path) -> None:
    (home / "mine").mkdir()
    for number in (1, 2, 3):
        (home / "mine" / f"big[q4]-0000{number}-of-00003.gguf").write_bytes(FILE)
    (home / "mine" / "big-00001-of-00002.gguf").write_bytes(FILE)
    actual = [(Path(model.name).name, model.n_bytes) for model in local_models(home / "mine")]
    assert actual == [
        ("big-00001-of-00002.gguf", len(FILE)),
        ("big[q4]-00001-of-00003.gguf", 3 * len(FILE)),
    ]


def test_what_leads_nowhere_does_not_end_the_list(home: Path) -> None:
    model = save_model(home / "mine" / "tiny", seed=1)
    (model / "more.safetensors").symlink_to(home / "gone")
    (home / "mine" / "a.gguf").symlink_to(home / "gone")
    (actual,) = local_models(home / "mine")
    assert actual.name == str(model)
