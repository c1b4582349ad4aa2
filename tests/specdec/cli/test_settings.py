"""Options from SPECDEC_* variables and from a file; completion in a shell."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import expect_error

from specdec.cli.app import main

SERVE = ["serve", "-m", "pair:target"]
"""Refused before anything is loaded, with the host in the message."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's file is looked for."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "specdec").mkdir()
    return tmp_path / "specdec"


def host(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The host that the command has taken."""
    assert main([*argv]) == 2
    return capsys.readouterr().err.partition("host is ")[2].partition(",")[0]


def test_typed_before_variable_before_file(
    capsys: pytest.CaptureFixture[str], own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = own_folder / "config.toml", own_folder / "other.toml"
    file.write_text('model = "pair:target"\nhost = "10.0.0.1"\nspec-type = "none"\n')
    assert host(capsys, "serve") == "10.0.0.1"
    file.write_text('host = "10.0.0.1"\n[serve]\nhost = "10.0.0.2"\nport = 80\nctx_size = 256\n')
    assert host(capsys, *SERVE) == "10.0.0.2"
    other.write_text('[serve]\nhost = "10.0.0.3"\n')
    assert host(capsys, "--config", str(other), *SERVE) == "10.0.0.3"
    monkeypatch.setenv("SPECDEC_CONFIG", str(other))
    assert host(capsys, *SERVE) == "10.0.0.3"
    monkeypatch.setenv("SPECDEC_HOST", "10.0.0.4")
    assert host(capsys, *SERVE) == "10.0.0.4"
    assert host(capsys, *SERVE, "--host", "10.0.0.5") == "10.0.0.5"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memry = 1", "no command has an option --memry"),
        ("[serve]\nprompt_cache_file = 'x'", "specdec serve does not have an option"),
        ("[sarve]\nport = 1", "--sarve"),
        ("serve = 1", "write [serve]"),
        ("api-key = 'secret'", "--api-key"),
        ("a = = 1", "cannot be read as TOML"),
        ("[serve]\nthreads = 'x'", "threads"),
    ],
)
def test_a_file_that_is_wrong(
    text: str, named: str, capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    (own_folder / "config.toml").write_text(text)
    expect_error(capsys, SERVE, named)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(capsys, ["--config", "/nowhere.toml", *SERVE], "/nowhere.toml")


def test_a_shell_is_told_what_may_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "specdec run --memo")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["--memory-budget"]
