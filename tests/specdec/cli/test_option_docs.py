"""The option tables in docs/ repeat the help text of each field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from option_tables import PAGE, filled

from specdec.option import Option, options_of
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions

DOCS = Path(__file__).resolve().parents[3] / "docs"


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a page."""
    lines = re.findall(r"^\| (.*) \|$", text.replace("\\|", "/"), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_tables_of_cli_md_are_those_of_the_options() -> None:
    page = PAGE.read_text()
    assert page.count("<!-- options: ") == page.count("<!-- end of options -->") == 6
    assert filled(page) == page, "run python -m tests.helpers.option_tables"


def test_all_keywords_of_load_are_in_the_table() -> None:
    page = (DOCS / "api.md").read_text()
    section = page[page.index("\n## specdec.load") : page.index("\n## LLM.generate")]
    named = {name for cells in rows(section) for name in re.findall("`([a-z_]+)`", cells[0])}
    assert named == {*options_of(RunOptions), "progress"}


@pytest.mark.parametrize("field", dataclasses.fields(ServeOptions), ids=lambda field: field.name)
def test_options_of_the_server_are_in_its_table(field: dataclasses.Field) -> None:
    page = (DOCS / "server.md").read_text()
    flag = "`--" + field.name.replace("_", "-") + "`"
    (cells,) = (cells for cells in rows(page) if flag in re.findall("`[^`]*`", cells[0]))
    option = field.metadata[Option]
    shown = option.shown_default
    if flag != "`--api-key-file`":  # in the same row as the key itself
        assert cells[-1] == (shown if isinstance(shown, str) else str(field.default))
