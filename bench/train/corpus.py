"""Corpus of the embedded pair: permissively licensed Python source on this machine.

A corpus root is any folder that holds installed distributions (a site-packages folder, or
wheels unpacked side by side): each `*.dist-info` names the licence and lists the files. The
running interpreter's standard library is a root of its own (PSF licence).
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|[0-4]-?clause|0BSD|Apache|ASL|PSF|PSFL|Python Software Foundation|Python-2\.0|ISC"
    r"|Zlib|CC0|Unlicense|HPND|MIT-CMU|BSL-1\.0)",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(r"GPL|MPL|Mozilla|EPL|EUPL|CDDL|proprietary|commercial", re.IGNORECASE)
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "fixtures", "migrations", "locale", "locales", "encodings"}
    | {"_vendor", "vendor", "vendored", "extern", "externals", "site-packages", "__pycache__"}
    | {"idlelib", "lib2to3", "turtledemo", "pydoc_data"}
)
# No benchmark problem may enter the corpus, whatever folder it was found in.
FORBIDDEN = re.compile(r"human_?eval|has_close_elements|separate_paren_groups", re.IGNORECASE)
GENERATED = re.compile(
    r"auto[- ]?(matically )?generated|generated (by|from|file)|do not edit", re.IGNORECASE
)
MAX_FILE_BYTES = 150_000
MIN_FILE_BYTES = 300
MAX_FUNCTION_CHARS = 2_400
FAVOURED_REPEATS = 3
VALIDATION_SHARE = 100  # one file in this many, chosen by hash, is never trained on


@dataclass(frozen=True)
class Source:
    """Distribution (or the standard library) that is part of the corpus."""

    name: str
    version: str
    licence: str
    n_files: int
    n_bytes: int


@dataclass(frozen=True)
class Corpus:
    """Files and functions to train on, files to validate on, and their sources."""

    train_files: list[str]
    train_functions: list[str]
    valid_files: list[str]
    sources: list[Source]
    refused: list[str] = field(default_factory=list)  # "name version: licence"


def licence_of(dist: metadata.Distribution) -> str:
    """Return the licence that a distribution's metadata states, in one short line."""
    meta = dist.metadata
    if "License-Expression" in meta:
        return meta["License-Expression"].strip()
    classifiers = meta.get_all("Classifier") or []
    stated = [c.rsplit("::", 1)[-1].strip() for c in classifiers if c.startswith("License ::")]
    stated = [name for name in stated if name != "OSI Approved"]
    if stated:
        return ", ".join(stated)
    text = meta["License"].strip() if "License" in meta else ""
    return text.splitlines()[0][:80] if text else "not stated"


def is_permissive(licence: str) -> bool:
    """Return True for MIT, BSD, Apache, PSF and the like, only if no other licence is named."""
    return bool(PERMISSIVE.search(licence)) and not RESTRICTIVE.search(licence)


def is_ordinary_source(text: str) -> bool:
    """Return False for generated files, tables and anything that does not look hand-written."""
    if GENERATED.search(text[:2_000]) or FORBIDDEN.search(text):
        return False
    lines = text.splitlines()
    if not lines or max(map(len, lines)) > 500 or len(text) / len(lines) > 80:
        return False
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    return letters / len(text) > 0.72 and "def " in text


def strip_header(text: str) -> str:
    """Drop the comment block (shebang, licence) at the top, which many files share."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    return "".join(lines[first:])


def documented_functions(text: str) -> Iterator[str]:
    """Yield each short function with a docstring, dedented, as a document of its own."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) <= MAX_FUNCTION_CHARS:
                yield source


def read_sources(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield (sha256 of the file, text) of the ordinary files among `paths`."""
    for path in paths:
        try:
            raw = path.read_bytes()
            if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES:
                continue
            text = raw.decode("utf-8").replace("\r\n", "\n").replace("\t", "    ")
        except (OSError, UnicodeDecodeError):
            continue
        if is_ordinary_source(text):
            yield hashlib.sha256(raw).hexdigest(), strip_header(text)


def _python_files(dist: metadata.Distribution) -> list[Path]:
    names = [f for f in dist.files or [] if f.suffix == ".py"]
    chosen = [f for f in names if not SKIPPED_FOLDERS.intersection(f.parts[:-1])]
    return [Path(str(dist.locate_file(f))) for f in chosen if not f.name.startswith("test_")]


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    ]


def _candidates(roots: list[Path]) -> Iterator[tuple[str, str, str, list[Path]]]:
    """Yield (name, version, licence, files): the standard library, then the distributions."""
    yield "python-stdlib", platform.python_version(), "PSF-2.0", _stdlib_files()
    distributions: dict[str, metadata.Distribution] = {}
    for root in roots:
        for dist in metadata.distributions(path=[str(root)]):
            distributions.setdefault(dist.metadata["Name"].lower(), dist)
    for name in sorted(distributions):
        dist = distributions[name]
        yield name, dist.version, licence_of(dist), _python_files(dist)


def collect(roots: list[Path], cap_bytes: int, favoured: frozenset[str] = frozenset()) -> Corpus:
    """Read the corpus.

    Args:
        roots: folders of installed distributions, besides the standard library.
        cap_bytes: maximum bytes from one distribution, chosen by file hash, so that one large
            package does not set the style.
        favoured: names of distributions whose text is repeated, for it has the desired style
            (short self-contained functions).
    """
    corpus = Corpus([], [], [], [])
    seen: set[str] = set()
    for name, version, licence, paths in _candidates(roots):
        if not is_permissive(licence):
            corpus.refused.append(f"{name} {version}: {licence}")
            continue
        n_files = n_bytes = 0
        for digest, text in sorted(read_sources(paths)):
            if digest in seen or n_bytes + len(text) > cap_bytes:
                continue
            seen.add(digest)
            n_files, n_bytes = n_files + 1, n_bytes + len(text.encode())
            if int(digest[-8:], 16) % VALIDATION_SHARE == 0:
                corpus.valid_files.append(text)
            else:
                repeats = FAVOURED_REPEATS if name in favoured else 1
                corpus.train_files.extend([text] * repeats)
                corpus.train_functions.extend(list(documented_functions(text)) * repeats)
        if n_files:
            corpus.sources.append(Source(name, version, licence, n_files, n_bytes))
    return corpus
