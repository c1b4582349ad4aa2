"""Files beside models that are no models: in folders, caches and the list of drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_bytes as gb
import huggingface_hub.constants
import pytest
from tiny_pair import save_model

from backends.contract.backend import UnsupportedModel
from backends.gguf.model import load_gguf_model
from specdec.models.drafts import drafts_for
from specdec.models.local_models import local_models
from specdec.models.names import ModelNotFound, resolve_model

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n".encode()
SINGLE = {"some.weight": ("F32", (4,))}
NEXTN = {"block_count": ("u32", 3), "nextn_predict_layers": ("u32", 1)}


def of(architecture: str, kind: str = "model", **keys: tuple[str, Any]) -> dict[str, Any]:
    return {"general.type": ("str", kind)} | gb.model_metadata(architecture, **keys)


COMPANIONS: dict[str, bytes] = {
    "mmproj-F16.gguf": gb.make_file({"general.architecture": ("str", "clip")}, SINGLE),
    "mmproj-model-F16.gguf": gb.make_file({"general.type": ("str", "mmproj")}, SINGLE),
    "lora-F16.gguf": gb.make_file(of("llama", "adapter"), SINGLE),
    "imatrix-F16.gguf": gb.make_file({"general.type": ("str", "imatrix")}, SINGLE),
    "vocab-F16.gguf": gb.make_file(of("llama"), {}),
    "eagle3-F16.gguf": gb.make_file(of("eagle3"), SINGLE),
    "mtp-F16.gguf": gb.make_file(of("glm4", **NEXTN), {"blk.2.nextn.enorm.weight": ("F32", (4,))}),
    "embed-F16.gguf": gb.make_file(of("qwen3", pooling_type=("u32", 3)), gb.model_tensors()),
    "not-fetched-F16.gguf": POINTER,
}
MODEL = gb.make_file(gb.model_metadata(), gb.model_tensors())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user without models, with an empty hub cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "XDG_CACHE_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def add_repository(home: Path, name: str, files: dict[str, bytes]) -> Path:
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = fill(repository / "snapshots" / ("0" * 40), {})
    (repository / "blobs").mkdir()
    for number, (file, content) in enumerate(files.items()):
        blob = repository / "blobs" / f"{number:040d}"
        blob.write_bytes(content)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_companion_beside_a_model_is_not_meant(home: Path, name: str) -> None:
    folder = fill(home / "model", {name: COMPANIONS[name], "model-F16.gguf": MODEL})
    assert resolve_model(folder) == folder / "model-F16.gguf"
    assert [model.name for model in local_models(folder)] == [str(folder / "model-F16.gguf")]


def test_all_companions_beside_a_split_model(home: Path) -> None:
    parts = gb.write_splits(
        fill(home / "model", COMPANIONS), gb.model_metadata(), [{}, gb.model_tensors()]
    )
    assert resolve_model(home / "model") == parts[0]
    assert [model.name for model in local_models(home / "model")] == [str(parts[0])]


def test_several_models_are_ambiguous_without_the_companions(home: Path) -> None:
    folder = fill(home / "model", {**COMPANIONS, "a-Q4.gguf": MODEL, "b-Q8.gguf": MODEL})
    match = "holds 2 GGUF models: name one of a-Q4.gguf, b-Q8.gguf$"
    with pytest.raises(ModelNotFound, match=match):
        resolve_model(folder)


@pytest.mark.parametrize("name", COMPANIONS)
def test_companions_without_a_model_are_reported_by_kind(home: Path, name: str) -> None:
    files = {name: COMPANIONS[name], f"other-{name}": COMPANIONS[name]}
    with pytest.raises(ModelNotFound, match="no language model, but 2 other GGUF .* is a"):
        resolve_model(fill(home / "both", files))
    path = fill(home / "alone", {name: COMPANIONS[name]}) / name
    assert resolve_model(path.parent) == resolve_model(path) == path
    with pytest.raises(Exception, match=r"F16\.gguf.* is an? ") as caught:
        load_gguf_model(path)
    assert isinstance(caught.value, UnsupportedModel) or "Git LFS" in str(caught.value)


def test_a_repository_of_the_hub(home: Path) -> None:
    files = {**COMPANIONS, "tiny-F16.gguf": MODEL, "tiny-Q8_0.gguf": MODEL}
    snapshot = add_repository(home, "me/tiny", files)
    assert resolve_model("me/tiny:F16") == snapshot / "tiny-F16.gguf"
    actual = [model.name for model in local_models()]
    assert actual == ["me/tiny:tiny-F16.gguf", "me/tiny:tiny-Q8_0.gguf"]
    with pytest.raises(ModelNotFound, match="2 other GGUF files: mmproj-F16.gguf is a projector"):
        resolve_model("me/tiny:mmproj")


def test_a_model_in_a_folder_of_its_repository_keeps_its_name(home: Path) -> None:
    snapshot = add_repository(home, "me/tiny", {"F16/tiny-F16.gguf": MODEL, "a-Q8.gguf": MODEL})
    names = [model.name for model in local_models()]
    assert sorted(names) == ["me/tiny:a-Q8.gguf", "me/tiny:tiny-F16.gguf"]
    assert resolve_model("me/tiny:tiny-F16.gguf") == snapshot / "F16" / "tiny-F16.gguf"


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FOLDERS: dict[str, dict[str, bytes]] = {
    "diffusers": {"model_index.json": text({"_class_name": "FluxPipeline"})},
    "body": {"config.json": text({**LLAMA, "architectures": ["LlamaModel"]})},
    "embedder": {"config.json": text(LLAMA), "modules.json": text([{"type": "x.Pooling"}])},
    "bert": {"config.json": text({"model_type": "bert"})},
    "adapter": {"adapter_config.json": text({"base_model_name_or_path": "a/b"})},
    "no config": {},
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_checkpoints_that_are_no_language_models_are_not_listed(home: Path, kind: str) -> None:
    weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    files = {**FOLDERS[kind], weights: b"weights"}
    add_repository(home, "me/other", files)
    add_repository(home, "me/llama", {"config.json": text(LLAMA), "model.safetensors": b"w"})
    assert [model.name for model in local_models(fill(home / "mine", files))] == ["me/llama"]


@pytest.mark.parametrize("fetched", [{}, {"model-00001-of-00002.safetensors": b"weights"}])
def test_a_checkpoint_whose_weights_were_not_fetched_is_not_listed(
    home: Path, fetched: dict[str, bytes]
) -> None:
    files = {"config.json": text(LLAMA), "model-00002-of-00002.safetensors": POINTER}
    fill(home / "mine", {**files, **fetched})
    assert local_models(home / "mine") == []


@pytest.mark.parametrize("kind", ["diffusers", "adapter"])
def test_a_folder_without_a_config_is_reported_by_kind(home: Path, kind: str) -> None:
    with pytest.raises(ModelNotFound, match=f"mine is an? .*{kind.removesuffix('s')}"):
        resolve_model(fill(home / "mine", FOLDERS[kind]))


def lm_studio(home: Path) -> Path:
    return home / ".lmstudio" / "models" / "me" / "it"


def llama_cpp(home: Path) -> Path:
    return home / ".cache" / "llama.cpp"


@pytest.mark.parametrize("place", [lm_studio, llama_cpp])
def test_folders_of_other_programs(home: Path, place: Callable[[Path], Path]) -> None:
    folder = fill(place(home), {**COMPANIONS, "model.gguf": MODEL})
    assert [model.name for model in local_models()] == [str(folder / "model.gguf")]


def add_to_ollama(home: Path, name: str, *contents: bytes) -> list[Path]:
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
    manifest.parent.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    kind = "application/vnd.ollama.image.model"
    digests = [f"sha256:{name}{number}" for number in range(len(contents))]
    layers = [{"mediaType": kind, "digest": digest} for digest in digests]
    manifest.write_text(json.dumps({"layers": layers}))
    blobs = [root / "blobs" / digest.replace(":", "-") for digest in digests]
    for blob, content in zip(blobs, contents, strict=True):
        blob.write_bytes(content)
    return blobs


def test_ollamas_models(home: Path) -> None:
    projector = COMPANIONS["mmproj-F16.gguf"]
    _, model = add_to_ollama(home, "seeing", projector, MODEL)
    (embedder,) = add_to_ollama(home, "embedder", COMPANIONS["embed-F16.gguf"])
    assert [item.name for item in local_models()] == ["ollama:seeing:latest"]
    assert resolve_model("ollama:seeing") == model
    assert resolve_model("ollama:embedder") == embedder  # refused by name


def test_drafts_are_no_companions(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = save_model(home / "tiny", seed=1)
    fill(llama_cpp(home), COMPANIONS)
    assert drafts_for(str(target), local_models()) == []
    assert not [record for record in caplog.records if "F16" in record.message]
