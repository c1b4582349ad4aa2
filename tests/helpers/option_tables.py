"""The tables of options in docs/cli.md, generated from the options themselves.

    python -m tests.helpers.option_tables      # writes them into the page

A table stands between `<!-- options: COMMAND -->` and `<!-- end of options -->`. That of `run` has
all options, in the order of its help; the others what `run` has not, or has with another default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from specdec.cli.app import app
from specdec.cli.help import shown_default
from specdec.cli.other_names import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BASE = "run"
MARKED = re.compile(r"(<!-- options: ([\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
OTHER_NAMES = re.compile(r"(<!-- other names -->\n).*?(<!-- end of other names -->)", re.DOTALL)
HEAD = "| option | meaning | default |\n|---|---|---|\n"


def filled(page: str) -> str:
    """Return the page with all its tables regenerated."""
    page = OTHER_NAMES.sub(lambda actual: f"{actual[1]}\n{table()}\n{actual[2]}", page)
    return MARKED.sub(lambda actual: f"{actual[1]}\n{tables(actual[2])}\n{actual[3]}", page)


def tables(command: str) -> str:
    """Return a table for each panel of the command's help, those without a panel first."""
    base = {} if command == BASE else {name(option): row(option) for option in options(BASE)}
    panels: dict[str, list[str]] = {"": []}
    for option in options(command):
        if base.get(name(option)) != row(option):
            panels.setdefault(option.rich_help_panel or "", []).append(row(option))
    titled = command == BASE
    return "\n".join(
        (f"**{panel or 'Prompt and output'}**\n\n" if titled else "") + HEAD + "".join(rows)
        for panel, rows in panels.items()
        if rows
    )


def options(command: str) -> list[Any]:
    actual = typer.main.get_command(app).commands[command].params
    return [item for item in actual if item.param_type_name == "option" and not item.hidden]


def name(option: Any) -> str:
    return max(option.opts, key=len)


def row(option: Any) -> str:
    """Return a line of a table: names, choices and help, and the default where there is one."""
    names = ", ".join(f"`{item}`" for item in (*option.opts, *option.secondary_opts))
    meaning = option.help
    if "|" in (option.metavar or ""):
        meaning = f"{choices(option.metavar)}. {meaning}"
    return f"| {names} | {escaped(meaning.rstrip('.'))} | {escaped(shown_default(option))} |\n"


def choices(metavar: str) -> str:
    return ", ".join(f"`{item}`" if item.islower() else item for item in metavar.split("|"))


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
