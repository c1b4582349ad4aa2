"""The field's words: identifiers of the code, and how docstrings begin (docs/glossary.md)."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("specdec", "offload", "backends", "bench", "tests")

# Old word as a whole identifier -> the field's word.
NAMES = {
    "texts": "sequences",
    "n_texts": "num_seqs",
    "max_texts": "max_num_seqs",
    "n_rows": "num_tokens, or num_rows of a matrix",
    "max_rows": "max_num_tokens",
    "kv_rows": "num_kv_slots",
    "node_room": "num_free_slots",
    "found": "a noun",
    "wanted": "requested",
    "told": "reported",
    "most": "a name with max_",
    "least": "a name with min_",
    "others": "a noun",
    "one": "a noun",
    "kept": "cached",
    "held": "pinned",
    "hold": "pin_layers",
    "room": "capacity",
    "figures": "metrics, results",
    "worth": "score",
    "settle": "accept",
    "lend": "acquire, pin",
    "set_aside": "preempted",
    "restored": "swapped_in",
    "is_fresh": "skips_cache",
    "way": "mode",
    "ways": "modes",
}
# Old word as a part of an identifier -> the field's word.
PARTS = {
    "arrive": "reach",
    "bring": "fetch",
    "credit": "exploration budget",
    "crowd": "load test",
    "experience": "acceptance statistics",
    "lender": "layer access",
    "lending": "pinning",
    "lent": "pinned",
    "lessons": "acceptance statistics",
    "loan": "acquired layer",
    "lockstep": "batched drafting",
    "mended": "recovered",
    "news": "new_token_ids",
    "outlook": "what-if plan",
    "placer": "planner",
    "recall": "load_cached",
    "remembered": "disk cache",
    "repaired": "recovered",
    "residency": "placement",
    "soak": "soak test",
    "spare": "opportunistic layers",
    "stake": "exploration budget",
    "steady": "batch-invariant",
    "ticket": "read sequence number",
    "visit": "access",
    "welcome": "schedule",
    "world": "scenario",
    "worlds": "scenarios",
}
STARTS = ("Of", "What", "Where", "Those", "That", "Its")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


@cache
def sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield token.start[0], token.string


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of fields and constants included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def problem(name: str) -> str | None:
    """Return the word to use in place of one in `name`."""
    if name.startswith("test_") or name.isupper() and len(name) == 1:
        return None
    bare = name.strip("_").lower()
    if bare in NAMES:
        return NAMES[bare]
    parts = [part.lower() for part in _PARTS.findall(name)]
    return next((PARTS[part] for part in parts if part in PARTS), None)


def test_identifiers_are_the_fields_words() -> None:
    wrong = [
        f"{file}:{line}: {name}: {word}"
        for file, source in sources().items()
        for line, name in identifiers(source)
        if (word := problem(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_begin_with_an_imperative_or_a_noun() -> None:
    wrong = [
        f"{file}:{line}: {text[:60]!r}"
        for file, source in sources().items()
        for line, text in docstrings(source)
        if text.split() and text.split()[0].strip('`*"') in STARTS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "is_fine"),
    [
        ("n_texts", False),
        ("plan_residency", False),
        ("LayerLender", False),
        ("_held", False),
        ("num_seqs", True),
        ("spread", True),
        ("credible", True),
        ("text", True),
    ],
)
def test_a_name_is_judged_by_its_words(name: str, is_fine: bool) -> None:
    assert (problem(name) is None) == is_fine
