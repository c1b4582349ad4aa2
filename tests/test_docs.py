"""Documentation refers only to existing files, folders, headings and programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TOP = ("offload", "backends", "specdec", "bench", "tests", "docs")

_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(TOP)})/[\w./*-]*[\w/*]")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_MODULE = re.compile(r"python3? -m ((?:offload|backends|specdec|bench)[\w.]*)")
_FILE = re.compile(r"(?<![\w/.*-])\w+\.py\b")


def exists(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, as the usual Markdown renderers make them."""
    headings = re.findall(r"^#+ +(.*?)\s*$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    named = {path.rstrip(".") for path in _PATH.findall(page.read_text())}
    missing = sorted(path for path in named if not exists(path))
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("script", ["Makefile", "tests/arm/arm.sh"])
def test_paths_of_scripts_exist(script: str) -> None:
    """The emulated tests take hours, so that a path that has moved is noticed late."""
    named = _PATH.findall((ROOT / script).read_text())
    assert named
    missing = sorted(path for path in named if not exists(path))
    assert not missing, f"{script} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_file_names_exist(page: Path) -> None:
    """File names without their folder are included."""
    here = {path.name for top in TOP for path in (ROOT / top).rglob("*.py")}
    missing = sorted(set(_FILE.findall(page.read_text())) - here)
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target, anchor in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert not wrong, f"{page.name} links to what is not there: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_started_exist(page: Path) -> None:
    named = {name.rstrip(".").replace(".", "/") for name in _MODULE.findall(page.read_text())}
    missing = {
        name for name in named if not (exists(f"{name}.py") or exists(f"{name}/__main__.py"))
    }
    assert not missing, f"{page.name} starts what is not there: {missing}"
