"""The tables of options in docs/ say of each field what the field itself says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from specdec.option import SAMPLING, Option, options_of
from specdec.run_options import RunOptions
from specdec.sampling.params import SamplingParams
from specdec.serve.options import ServeOptions

DOCS = Path(__file__).resolve().parents[3] / "docs"
FIELDS = [
    (field.name, field.default, field.metadata[Option])
    for kind in (RunOptions, SamplingParams)
    for field in dataclasses.fields(kind)
    if Option in field.metadata and field.metadata[Option].panel not in ("", SAMPLING)
]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a page."""
    lines = re.findall(r"^\| (.*) \|$", text.replace("\\|", "/"), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize(("name", "default", "told"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_an_option_and_its_default_are_in_the_table(
    name: str, default: object, told: Option
) -> None:
    page = (DOCS / "cli.md").read_text()
    section = page[page.index("\n## specdec run\n") : page.index("\n## specdec chat\n")]
    flags = {
        f"`{flag}`" for flag in (told.short, told.long or "--" + name.replace("_", "-")) if flag
    }
    found = [cells for cells in rows(section) if flags <= set(re.findall("`[^`]*`", cells[0]))]
    assert len(found) == 1, f"{flags} in {len(found)} rows"
    shown = told.shown_default
    expected = shown if isinstance(shown, str) else str(default) if shown else ""
    assert found[0][-1].strip() == expected or (not expected and found[0][-1] == "none")


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
    told = field.metadata[Option]
    shown = told.shown_default
    if flag != "`--api-key-file`":  # in one row with the key itself
        assert cells[-1] == (shown if isinstance(shown, str) else str(field.default))
