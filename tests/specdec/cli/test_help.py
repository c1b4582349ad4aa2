"""Help on two screens, and completion in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import typer
from command_line import ROOT

import bench.commands.app
from specdec.cli.app import app, main
from specdec.cli.arguments import understood
from specdec.cli.help import EXAMPLES

COMMAND = typer.main.get_command(app)
OF_BENCH = list(typer.main.get_command(bench.commands.app.app).commands)
COLUMNS, TWO_SCREENS = 80, 48
NAMES = [name for name in COMMAND.commands if name != "demo"]  # its help is specdec-bench's


@pytest.mark.parametrize("argv", [[], *([name, "--help"] for name in NAMES)])
def test_help_fits_two_screens(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    expect_two_screens(capsys)


@pytest.mark.parametrize("argv", [[], *([name, "--help"] for name in OF_BENCH)])
def test_help_of_the_benchmarks_fits_too(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.commands.app.main(argv) == 0
    expect_two_screens(capsys)


def expect_two_screens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= TWO_SCREENS
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("name", NAMES)
def test_all_options_are_in_the_full_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help-all"]) == 0
    full = capsys.readouterr().out
    assert max(map(len, full.splitlines())) <= COLUMNS
    for item in COMMAND.commands[name].params:
        assert all(option in full for option in item.opts if option.startswith("-"))
        assert (item.help or "").split()[0] in full
    assert main([name, "--help"]) == 0
    short = capsys.readouterr().out
    assert ("--help-all" in short) == (len(short) < len(full))


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_command_lines(name: str) -> None:
    assert EXAMPLES[name]
    for line in EXAMPLES[name]:
        words = shlex.split(line.split(" | ")[-1].split(" > ")[0])
        assert words[:2] == ["specdec", name]
        argv = understood(words[1:], COMMAND)
        COMMAND.commands[name].make_context(name, argv[1:])  # raises for an unknown option


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("specdec run --exact ", {"auto", "on", "off"}),
        ("specdec run --acceptance re", {"rejection"}),
        ("specdec run -md pair:d", {"pair:draft", "pair:dflash"}),
        ("specdec run --tem", {"--temperature"}),
        ("specdec ch", {"chat", "check"}),
    ],
)
def test_completion_knows_values(line: str, expected: set[str]) -> None:
    words = line.split(" ")
    environment = {
        **os.environ,
        "_SPECDEC_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-m", "specdec"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert set(done.stdout.split()) == expected, done.stderr


def test_a_reader_that_leaves_the_help_is_no_error() -> None:
    shell = f"{sys.executable} -m specdec run --help-all | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 141)
    assert done.stderr == ""
