"""Models of the hub's cache: drafts found there, and removing them."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from tiny_pair import save_model

import specdec
from specdec.cli.app import main
from specdec.models.drafts import best_draft, drafts_for
from specdec.models.local_models import local_models
from specdec.models.names import ModelNotFound, resolve_model


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
    assert best_draft("pair:target") == "pair:draft"
    arguments = ["run", "-m", "pair:target", "-md", "auto", "-p", "def f():", "-n", "2"]
    assert main(arguments) == 0
    assert "the draft model is pair:draft" in capsys.readouterr().err


def test_every_gguf_model_of_a_repository_is_listed_by_a_name_that_m_takes(hub: Path) -> None:
    """A repository of several used to be listed by a name that -m refused."""
    model = hub.parent / "several"
    model.mkdir()
    parts = [f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in ("tiny-Q4_0.gguf", *parts):
        (model / name).write_bytes(b"GGUF")
    add(hub, "me/several", model)
    actual = {item.name: item.n_bytes for item in local_models()}
    assert actual == {"me/several:big-Q8_0-00001-of-00002.gguf": 8, "me/several:tiny-Q4_0.gguf": 4}
    for name in actual:
        assert resolve_model(name).name == name.partition(":")[2]


def test_the_largest_of_a_quarter_is_taken(hub: Path) -> None:
    add(hub, "me/draft", resolve_model("pair:draft"))
    add(hub, "me/same", resolve_model("pair:target"))
    add(hub, "me/other", save_model(hub.parent / "tiny", seed=1))
    fitting = drafts_for("pair:target", local_models())
    assert [item.name for item in fitting] == ["pair:draft", "me/draft", "me/same"]
    assert best_draft("pair:target") in ("pair:draft", "me/draft")  # of equal size


def test_a_target_without_a_draft(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_model(hub.parent / "tiny", seed=1)
    with pytest.raises(ModelNotFound, match="no model on this machine has the vocabulary"):
        specdec.load(target, "auto")
    capsys.readouterr()
    assert main(["plan", "-m", str(target), "-md", "auto"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
        ("", 2, "nobody answers: pass --yes"),
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
