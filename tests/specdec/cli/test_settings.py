"""Options from SPECDEC_* variables and from a file; shell completion."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import expect_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.cli.app import main
from specdec.cli.commands import check

SERVE = ["serve", "-m", "pair:target"]
"""An option refused before anything is loaded, with the host in the message."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder of the user's settings file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "specdec").mkdir()
    return tmp_path / "specdec"


def host(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the host that the command uses."""
    assert main([*argv]) == 2
    return capsys.readouterr().err.lower().partition("host is ")[2].partition(",")[0]


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


@pytest.mark.parametrize("value", ["'./none'", "['./none']"])
def test_one_value_where_several_may_be(
    value: str, capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    text = f"host = '10.0.0.1'\nspec-type = 'draft'\ndraft-model = {value}\n"
    (own_folder / "config.toml").write_text(text)
    assert host(capsys, *SERVE) == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memry = 1", "no command has an option --memry"),
        ("[serve]\nprompt_cache_file = 'x'", "specdec serve does not have an option"),
        ("[sarve]\nport = 1", "--sarve"),
        ("serve = 1", "write [serve]"),
        ("api-key = 'secret'", "--api-key"),
        ("a = = 1", "cannot be read as TOML"),
        ("[serve]\nthreads = 'x'", "config.toml: Invalid value for '--threads'"),
        ("[serve]\nthreads = [1]", "config.toml: threads is a list, but takes one value"),
        ("exact = true", "exact is 'true', must be one of"),
    ],
)
def test_a_file_that_is_wrong(
    text: str, named: str, capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    (own_folder / "config.toml").write_text(text)
    expect_error(capsys, SERVE, named)


KNOWN = b"model = 'm'\n[serve]\nhost = '10.0.0.1'\nport = 80\nthreads = 2\n[run]\ntop-p = 0.5\n"


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(KNOWN)), n_replaced=st.integers(0, 20), data=st.binary(max_size=8))
def test_changed_bytes_of_a_file_are_taken_or_refused_in_one_line(
    at: int,
    n_replaced: int,
    data: bytes,
    capsys: pytest.CaptureFixture[str],
    own_folder: Path,
) -> None:
    changed = KNOWN[:at] + data + KNOWN[at + n_replaced :]
    (own_folder / "config.toml").write_bytes(changed)
    expect_error(capsys, [*SERVE, "--host", "10.0.0.1"])  # in the file, or in the host


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(capsys, ["--config", "/nowhere.toml", *SERVE], "/nowhere.toml")


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    main(["--config", str(tmp_path / "pipe.toml"), "run", "-m", "/nowhere", "-p", "a"])
    assert "/nowhere" in capsys.readouterr().err  # it counts as an empty file


def test_a_shell_gets_completions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "specdec run --memo")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["--memory-budget"]


def test_a_ranking_gets_all_of_them(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check --rank` starts another program, which reads neither variables nor the file."""
    file = tmp_path / "other.toml"
    file.write_text('model = "pair:target"\n[check]\nexact = "off"\nn-prompts = 2\n')
    monkeypatch.setenv("SPECDEC_MEMORY_BUDGET", "1GiB")
    monkeypatch.setenv("SPECDEC_DRAFT_MODEL", "a b")
    handed: list[str] = []
    monkeypatch.setattr(check, "run_benchmark", lambda name, words: handed.extend([name, *words]))
    typed = ["--rank", "--prompts", "-p.jsonl", "--seed", "3", "-n", "4"]
    assert main(["--config", str(file), "check", *typed]) == 0
    assert handed[0] == "bench.rank"
    assert sorted(handed[1:]) == [
        "--draft-model=a",
        "--draft-model=b",
        "--exact=off",
        "--max-tokens=4",
        "--memory-budget=1GiB",
        "--model=pair:target",
        "--n-prompts=2",
        "--prompts=-p.jsonl",
        "--seed=3",
    ]


def test_a_user_without_a_home_has_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run under a user id that is missing in /etc/passwd."""

    def nobody(_number: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")


def test_a_home_that_is_shut_has_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -u` may keep an inaccessible HOME."""

    def shut(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", shut)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("THREADS", "x", "SPECDEC_THREADS: Invalid value for '--threads': 'x' should be"),
        ("MEMORY_BUDGET", "lots", "SPECDEC_MEMORY_BUDGET: 'lots' is not a byte count"),
        ("NUM_DRAFT_TOKENS", "many", "SPECDEC_NUM_DRAFT_TOKENS is 'many', must be auto or"),
        ("TEMPERATURE", "-1", "SPECDEC_TEMPERATURE is -1.0, must be 0"),
        ("EXACT", "maybe", "SPECDEC_EXACT is 'maybe', must be one of auto, on, off"),
    ],
)
def test_a_bad_variable_is_named(
    name: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"SPECDEC_{name}", value)
    expect_error(capsys, ["run", "-m", "no/such/model", "-p", "x"], message)
    option = f"--{name.lower().replace('_', '-')}"
    assert main(["run", "-m", "no/such/model", "-p", "x", option, value]) == 2
    assert "SPECDEC" not in capsys.readouterr().err, "an option that is typed is named as typed"


def test_a_missing_file_is_reported_with_its_variable(monkeypatch, capsys, tmp_path) -> None:
    missing = tmp_path / "schema.json"
    monkeypatch.setenv("SPECDEC_JSON_SCHEMA", str(missing))
    assert main(["run", "-m", "pair:target", "-p", "hi"]) == 2
    error = capsys.readouterr().err
    assert f"error: SPECDEC_JSON_SCHEMA: {missing}: No such file or directory\n" in error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MODEL", "smolm", "did you mean smollm2"),
        ("DRAFT_MODEL", "nothing", "no such model: nothing"),
        ("CHAT_TEMPLATE", "nothing", "no chat template 'nothing'"),
        ("MEMORY_BUDGET", "999GiB", "the memory budget of"),
        ("CONFIG", "/nowhere", "/nowhere cannot be read as TOML"),
    ],
)
def test_the_variable_behind_a_bad_name_is_named(
    name: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECDEC_MODEL", "pair:target")
    monkeypatch.setenv(f"SPECDEC_{name}", value)
    expect_error(capsys, ["run", "-p", "x"], message, f"SPECDEC_{name}")


def test_the_file_behind_a_bad_name_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('model = "smolm"')
    expect_error(capsys, ["--config", str(file), "run", "-p", "x"], f"(--model is set by {file})")
