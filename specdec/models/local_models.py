"""Models that are on this machine already, in the folders of other programs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.heads.kinds import head_kind
from offload.process.home import home_folder
from specdec.models.kinds import is_model, no_model
from specdec.models.packaged import PACKAGED
from specdec.pair import GGUF_SUFFIX

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRevisionInfo

OLLAMA_PREFIX = "ollama:"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_REGISTRY = "registry.ollama.ai"
IsListed = Callable[[Path], bool]
"""Whether a file or folder is of the kind to list."""
SPLIT = re.compile(r"-(?P<number>\d{5})(?P<end>-of-\d{5}\.gguf)$")
"""Suffix of the file names of a split GGUF model."""


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. name: the value of -m that opens it."""

    name: str
    kind: str
    n_bytes: int
    keeper: str
    """Program in whose folder the model is."""


def local_models(folder: Path | None = None) -> list[LocalModel]:
    """Return all models that can be run, of every program, and of a folder of the user's."""
    result = [*_of_packages(), *_of_hub(is_model), *_of_ollama()]
    result += _of_folders(_program_folders(), is_model)
    if folder is not None:
        result += _of_folders({"folder": [folder]}, is_model)
    return result


def local_heads() -> list[LocalModel]:
    """Return all draft heads in files of their own, of every program that keeps such files."""
    return [*_of_hub(_is_head), *_of_folders(_program_folders(), _is_head)]


def _is_head(path: Path) -> bool:
    return head_kind(path) is not None


def ollama_blob(name: str) -> Path | None:
    """Return the GGUF file of `NAME[:TAG]`; None where Ollama has no such model here."""
    path, _, tag = name.partition(":")
    parts = path.split("/")
    if not all(parts) or {".", ".."} & {*parts, tag} or "/" in tag:
        return None
    before = {1: (_REGISTRY, "library"), 2: (_REGISTRY,)}.get(len(parts), ())
    manifest = _ollama_folder() / "manifests" / Path(*before, *parts) / (tag or "latest")
    return _model_blob(manifest) if manifest.is_file() else None


def _ollama_folder() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or home_folder() / ".ollama" / "models")


def _of_ollama() -> Iterator[LocalModel]:
    manifests = _ollama_folder() / "manifests"
    for path in sorted(manifests.rglob("*")):
        blob = _model_blob(path) if path.is_file() else None
        if blob is None or not blob.is_file() or not is_model(blob):
            continue
        registry, *parts, tag = path.relative_to(manifests).parts
        own = parts[1:] if (registry, *parts[:1]) == (_REGISTRY, "library") else parts
        words = own if registry == _REGISTRY else [registry, *parts]
        name = f"{OLLAMA_PREFIX}{'/'.join(words)}:{tag}"
        yield LocalModel(name, "GGUF", blob.stat().st_size, "Ollama")


def _model_blob(manifest: Path) -> Path | None:
    """Return the file with the weights; None for an invalid manifest.

    Projectors may be in a layer of the same type: the first model is returned, or where there is
    none the first file, whose opening raises an error with its name.
    """
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        blobs = [_blob(layer) for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    models = (blob for blob in blobs if len(blobs) > 1 and no_model(blob) is None)
    return next(models, blobs[0] if blobs else None)


def _blob(layer: dict[str, Any]) -> Path:
    digest = str(layer.get("digest")).replace(":", "-")
    return _ollama_folder() / "blobs" / Path(digest).name


def _of_packages() -> Iterator[LocalModel]:
    for name, model in PACKAGED.items():
        file = model.file()
        if file is not None:
            yield LocalModel(name, "GGUF", file.stat().st_size, f"Python package {model.package}")


def _of_hub(is_listed: IsListed) -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, ValueError):  # not there, or a file
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified)
        files = {_name_of(file, rev): file for rev in revisions for file in rev.files}
        yield from _of_repository(repo.repo_id, files, is_listed)


def _name_of(file: CachedFileInfo, revision: CachedRevisionInfo) -> str:
    """Return the path within the repository: folders may have files of the same name."""
    return file.file_path.relative_to(revision.snapshot_path).as_posix()


def _of_repository(
    name: str, files: Mapping[str, CachedFileInfo], is_listed: IsListed
) -> Iterator[LocalModel]:
    """Yield the models of a repository; a GGUF model is named by its file, as there may be several.

    files: files by name, of the latest revision that has them.
    """
    sizes = {name: file.size_on_disk for name, file in files.items()}
    weights = [n for file, n in sizes.items() if file.endswith(".safetensors") and "/" not in file]
    folder = files["config.json"].file_path.parent if "config.json" in files else None
    if weights and folder is not None and is_listed(folder):
        yield LocalModel(name, "safetensors", sum(weights), "Hugging Face")
    for file in sorted(sizes):
        split = SPLIT.search(file)
        if not file.endswith(GGUF_SUFFIX) or (split is not None and int(split["number"]) > 1):
            continue
        if not is_listed(files[file].file_path):
            continue
        stem, end = (file, "") if split is None else (file[: split.start()], split["end"])
        parts = [
            size for other, size in sizes.items() if other.startswith(stem) and other.endswith(end)
        ]
        yield LocalModel(f"{name}:{Path(file).name}", "GGUF", sum(parts), "Hugging Face")


def _program_folders() -> dict[str, list[Path]]:
    home = home_folder()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return {
        "LM Studio": [home / ".lmstudio" / "models", cache / "lm-studio" / "models"],
        "llama.cpp": [Path(os.environ.get("LLAMA_CACHE") or cache / "llama.cpp")],
    }


def _of_folders(folders: dict[str, list[Path]], is_listed: IsListed) -> Iterator[LocalModel]:
    for keeper, paths in folders.items():
        for folder in paths:
            for path in sorted(folder.rglob(f"*{GGUF_SUFFIX}")):
                parts = _parts(path)
                if parts and is_listed(path):
                    yield LocalModel(str(path), "GGUF", _n_bytes(parts), keeper)
            for path in sorted(folder.rglob("config.json")):
                weights = list(path.parent.glob("*.safetensors"))
                if weights and is_listed(path.parent):
                    yield LocalModel(str(path.parent), "safetensors", _n_bytes(weights), keeper)


def _parts(path: Path) -> list[Path]:
    """Return the files of a GGUF model; none for a later file of a split, as -m takes the first."""
    split = SPLIT.search(path.name)
    if not path.is_file() or (split is not None and int(split["number"]) > 1):
        return []
    if split is None:
        return [path]
    stem, end = path.name[: split.start()], split["end"]
    return [
        part
        for part in path.parent.glob(f"*{end}")
        if re.fullmatch(rf"{re.escape(stem)}-\d{{5}}{re.escape(end)}", part.name)
    ]


def _n_bytes(files: list[Path]) -> int:
    """Return the total size of existing files: a link may lead to a removed blob."""
    return sum(file.stat().st_size for file in files if file.is_file())
