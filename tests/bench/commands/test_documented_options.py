"""The command pages list every option, and no others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import bench.commands.app
import specdec.cli.app
from specdec.cli.other_names import RENAMED

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("cli.md", "server.md", "cli-bench.md")
DOC = "".join((DOCS / page).read_text() for page in PAGES)
APPS = {"specdec": specdec.cli.app, "specdec-bench": bench.commands.app}
COMMANDS = [
    f"{name} {command}"
    for name, module in APPS.items()
    for command, made in typer.main.get_command(module.app).commands.items()
    if not made.hidden
]


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Options listed by the help of "specdec run" and so on."""
    # `specdec demo` replaces this process, so a test would not return: use the other command's.
    app, name = command.replace("specdec demo", "specdec-bench demo").split()
    assert APPS[app].main([name, "--help-all"]) == 0
    rows = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"(?<!\S)--?[a-z][a-z-]*", row)}


def examples() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    text = re.sub(r"\s*\\?\n +", " ", "\n".join(blocks))
    lines = [line.split(" | ")[-1].split(" > ")[0] for line in text.splitlines()]
    return [line for line in lines if line.split(" ")[0] in APPS]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    actual = options_of(command, capsys) - {"--help", "-h"}
    assert {name for name in actual if not re.search(rf"(?<![\w-]){name}(?![\w-])", DOC)} == set()


@pytest.mark.parametrize("line", examples())
def test_examples_use_options_that_there_are(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line.replace("[", " ").replace("]", " "))
    known = options_of(" ".join(words[:2]), capsys) | set(RENAMED) | {"--help"}
    used = {word for word in words if word.startswith("-") and word not in ("-", "|")}
    assert used <= known
