"""The tables of options in docs/cli.md, made from the options themselves.

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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BASE = "run"
MARKED = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
HEAD = "| option | meaning | default |\n|---|---|---|\n"


def filled(page: str) -> str:
    """Return the page with all its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{tables(found[2])}\n{found[3]}", page)


def tables(command: str) -> str:
    """Return a table for each panel of the command's help, those without a panel first."""
    base = {} if command == BASE else {name(one): row(one) for one in options(BASE)}
    panels: dict[str, list[str]] = {"": []}
    for one in options(command):
        if base.get(name(one)) != row(one):
            panels.setdefault(one.rich_help_panel or "", []).append(row(one))
    titled = command == BASE
    return "\n".join(
        (f"**{panel or 'Prompt and output'}**\n\n" if titled else "") + HEAD + "".join(rows)
        for panel, rows in panels.items()
        if rows
    )


def options(command: str) -> list[Any]:
    found = typer.main.get_command(app).commands[command].params
    return [one for one in found if one.param_type_name == "option" and not one.hidden]


def name(option: Any) -> str:
    return max(option.opts, key=len)


def row(option: Any) -> str:
    """Return a line of a table: names, choices and help, and the default where there is one."""
    names = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
    meaning = option.help
    if "|" in (option.metavar or ""):
        meaning = f"{choices(option.metavar)}. {meaning}"
    return f"| {names} | {escaped(meaning.rstrip('.'))} | {escaped(default(option))} |\n"


def choices(metavar: str) -> str:
    return ", ".join(f"`{one}`" if one.islower() else one for one in metavar.split("|"))


def default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    is_told = option.show_default and option.default not in (None, False, "")
    return str(option.default) if is_told else ""


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
