"""Files copied along with the weights, and links among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_models import save_packable

from offload.errors import SpecdecError
from specdec.packing.pack import pack


def test_what_describes_the_weights_comes_along(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    (plain / "LICENSE").write_text("MIT")
    (plain / "pytorch_model.bin").write_bytes(b"pickle")
    pack(plain, tmp_path / "packed")
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert {"config.json", "tokenizer.json", "LICENSE"} <= names
    assert "pytorch_model.bin" not in names


def as_the_hub_caches_it(plain: Path, cache: Path) -> Path:
    """Lay out the snapshot with links into the blobs."""
    snapshot, blobs = cache / "models--me--it" / "snapshots" / "1", cache / "models--me--it/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        path.rename(blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    return snapshot


def test_links_of_the_hub_s_cache_become_files(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "LICENSE").write_text("MIT")
    pack(as_the_hub_caches_it(plain, tmp_path / "cache"), tmp_path / "packed")
    assert (tmp_path / "packed" / "LICENSE").read_text() == "MIT"
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("../letter.txt", "is a link to .*letter.txt, outside of the checkpoint's folder"),
        ("gone.txt", "notes.txt is missing or cannot be resolved"),
        ("notes.txt", "notes.txt is missing or cannot be resolved"),
        ("folder", "notes.txt leads to .*folder, which is not a regular file"),
        ("/dev/zero", "notes.txt is not a regular file"),
    ],
)
def test_links_that_lead_elsewhere_are_refused(tmp_path: Path, target: str, match: str) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "folder").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    (plain / "notes.txt").symlink_to(target)
    with pytest.raises(SpecdecError, match=match):
        pack(plain, tmp_path / "a" / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "letter.txt"}


def test_folders_do_not_come_along(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    (plain / "LICENSES").mkdir()
    pack(plain, tmp_path / "packed")
    assert not (tmp_path / "packed" / "LICENSES").exists()
