"""Resolution of a name to a directory or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.models.names import (
    ModelNotFound,
    check_local_draft,
    check_local_name,
    is_hub_id,
    resolve_draft,
    resolve_headers,
    resolve_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    return made


def test_a_checkpoint_directory_is_itself(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "exported.gguf").write_bytes(b"GGUF")
    assert resolve_model(folder) == folder


def test_a_gguf_file_is_itself(folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == path


def test_a_directory_with_one_gguf_model_means_that_model(folder: Path) -> None:
    for number in (1, 2, 3):
        (folder / f"big-{number:05d}-of-00003.gguf").write_bytes(b"GGUF")
    assert resolve_model(folder) == folder / "big-00001-of-00003.gguf"


def test_of_several_gguf_models_one_must_be_named(folder: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="holds 2 GGUF models: name one of a-Q4_0.gguf, a-Q8_0"):
        resolve_model(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weights.bin", "is a file: name a GGUF file or the checkpoint's directory"),
        ("pipe.gguf", "is not a regular file: name a GGUF file or"),
        ("missing.gguf", "no such model file: /"),
        ("none/at/all", "no such model directory: /"),
    ],
)
def test_what_is_no_model_is_said(folder: Path, name: str, reason: str) -> None:
    (folder / "weights.bin").write_bytes(b"x")
    os.mkfifo(folder / "pipe.gguf")
    with pytest.raises(ModelNotFound, match=reason):
        resolve_model(folder / name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "no such model: missing is not a file or directory here; give the path"),
        (
            "./missing",
            "no such model directory: \\./missing: correct the path; specdec models lists",
        ),
        ("missing.gguf", "missing.gguf is not a file or directory here"),
        ("a/b/c", "a/b/c is not a file or directory here"),
        ("smolm2", "here; did you mean smollm2\\? Else give the path"),
        ("SmolLM2:latest", "did you mean smollm2"),
        ("llama3", "ollama:NAME for a model that Ollama has here"),
        ("self:window=64", "self:window=64 meant the target as its own draft, which was removed"),
        ("self:", "removed because n-grams are faster: leave -md out, and they draft, or name a"),
        ("link", "link is a link that leads nowhere"),
        ("./link", "link is a link that leads nowhere"),
    ],
)
def test_a_name_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(ModelNotFound, match=reason):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_working_directory(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    for find in (resolve_model, resolve_headers, check_local_name):
        with pytest.raises(ModelNotFound, match="the model's name is empty: give a directory"):
            find(name)
    assert resolve_model(".") == Path()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline hub cache with one repository of GGUF files."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--tiny-GGUF"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "README.md"):
        (snapshot / name).write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub")
def test_a_hub_id_with_a_part_of_the_file_name(tmp_path: Path) -> None:
    assert resolve_model("someone/tiny-GGUF:Q8_0").name == "tiny-Q8_0.gguf"
    assert resolve_model("someone/tiny-GGUF:q4_0@main").name == "tiny-Q4_0.gguf"
    assert resolve_model("someone/tiny-GGUF:tiny-Q4_0.gguf").name == "tiny-Q4_0.gguf"


@pytest.mark.usefixtures("hub")
def test_a_hub_id_of_a_model_in_a_folder_of_its_repository(tmp_path: Path) -> None:
    """Repositories with split files have folders: the file was downloaded, and then not found."""
    folder = tmp_path / "models--someone--tiny-GGUF" / "snapshots" / ("0" * 40) / "Q6_K"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"tiny-Q6_K-{number:05d}-of-00002.gguf").write_bytes(b"GGUF")
    actual = resolve_model("someone/tiny-GGUF:Q6_K")
    assert actual == folder / "tiny-Q6_K-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("a/b", True), ("a/b:Q4_0", True), ("a/b:tiny-Q4_0.gguf", True), ("a/b.gguf", False)],
)
def test_what_is_a_hub_id(name: str, is_one: bool) -> None:
    """`specdec pull` of a full file name fetched it, and reported that it was already there."""
    assert is_hub_id(name) is is_one


@pytest.mark.usefixtures("hub")
def test_a_hub_id_of_several_gguf_files_wants_a_choice() -> None:
    with pytest.raises(ModelNotFound, match="name one of"):
        resolve_model("someone/tiny-GGUF")
    with pytest.raises(ModelNotFound, match="no GGUF file with 'Q2_K' in its name"):
        resolve_model("someone/tiny-GGUF:Q2_K")


@pytest.mark.usefixtures("hub")
def test_headers_of_what_is_here(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert resolve_headers(folder) == folder
    assert resolve_headers("someone/tiny-GGUF:Q8_0").name == "tiny-Q8_0.gguf"
    with pytest.raises(ModelNotFound, match="name one of"):
        resolve_headers("someone/tiny-GGUF")
    with pytest.raises(ModelNotFound, match="no such model"):
        resolve_headers("missing.gguf")


@pytest.mark.usefixtures("hub")
def test_of_a_checkpoint_elsewhere_only_the_json_is_downloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[object] = []

    def download(repo: str, *, allow_patterns: list[str], **options: object) -> str:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not in the cache")
        asked.append((repo, options["revision"], allow_patterns))
        (folder / "config.json").write_text("{}")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_headers("someone/large@v2") == folder
    assert asked == [("someone/large", "v2", ["*.json"])]


def test_a_draft_may_be_a_part_of_the_target(tmp_path: Path) -> None:
    assert resolve_draft(None) is None
    assert resolve_draft("mtp") is None
    check_local_draft("mtp")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_draft(tmp_path) == resolve_model(tmp_path)
    for find in (resolve_draft, check_local_draft):
        with pytest.raises(ModelNotFound, match="no such model directory"):
            find(tmp_path / "none")


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/model"])
@pytest.mark.parametrize("look_up", [resolve_model, resolve_headers, check_local_name])
def test_a_name_that_can_be_no_path(look_up: Callable[[str], object], name: str) -> None:
    with pytest.raises(ModelNotFound, match="cannot be looked up") as caught:
        look_up(name)
    assert len(str(caught.value)) < 250
