"""Text of the user as sequences of tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.text.contract import ChatTokenizer
from specdec.training.options import TrainError

MIN_TOKENS = 1024
"""Minimum text: with less, the held-out part would say nothing."""
_MIN_SEQUENCE = 16


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Return the text of files, and of all files of text in folders.

    Raises TrainError for a named file that is missing, empty or no UTF-8, and where folders hold
    none.
    """
    documents = [text for path in paths for text in _documents_of(path)]
    if not documents:
        names = ", ".join(map(str, paths))
        raise TrainError(f"{names}: no text there: name files of UTF-8 text, or folders of them")
    return documents


def _documents_of(path: Path) -> Iterator[str]:
    path = path.expanduser()
    if path.is_dir():
        yield from filter(None, map(_text_of, sorted(path.rglob("*"))))
        return
    if not path.is_file():
        raise TrainError(f"no such text: {path} is no file and no folder")
    text = _text_of(path)
    if not text:
        problem = "is no UTF-8 text" if path.stat().st_size else "is empty"
        raise TrainError(f"{path} {problem}: name a file of text")
    yield text


def _text_of(path: Path) -> str | None:
    """Return a file's text; None if it has none, or is no regular file that can be read."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None


def digest(documents: Sequence[str]) -> str:
    """Return a hash of the text."""
    state = hashlib.sha256()
    for text in documents:
        state.update(hashlib.sha256(text.encode()).digest())
    return state.hexdigest()[:16]


def token_sequences(
    documents: Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    length: int,
    max_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Return sequences of at most `length` tokens, in a seeded order of documents.

    A document begins as a prompt does, with the model's first token if it has one. The documents
    stay together, so that those at the end can be held out.

    Raises TrainError for text of fewer than MIN_TOKENS tokens.
    """
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    sequences: list[list[int]] = []
    n_tokens = 0
    for number in order:
        ids = tokenizer.encode(documents[number], parse_special=False)[: max_tokens - n_tokens]
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        pieces = [piece for piece in pieces if len(piece) >= min(_MIN_SEQUENCE, length)]
        sequences += pieces
        n_tokens += sum(map(len, pieces))
        if n_tokens >= max_tokens:
            break
    if n_tokens < MIN_TOKENS:
        raise TrainError(
            f"the text has {n_tokens} tokens, at least {MIN_TOKENS} are needed: give more text"
        )
    return sequences
