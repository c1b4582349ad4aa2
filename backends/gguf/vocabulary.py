"""Checks of the vocabulary in a GGUF header for errors on which llama.cpp would end the process.

Only the lists themselves are checked here. Other errors are found by loading the vocabulary with
llama.cpp in a process of its own, which may crash (backends/llama/trial.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import cast

import numpy as np

from offload.formats.gguf_header import GgufError, GgufMetadata

_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_ONE_EACH = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_KIND, _SENTENCEPIECE = "tokenizer.ggml.model", "llama"
_TABLE = "tokenizer.ggml.precompiled_charsmap"
_REMEDY = "the file is damaged, download it again"


def check_vocabulary(path: Path, metadata: GgufMetadata, num_tokens: int) -> None:
    """Raise GgufError unless there are `num_tokens` distinct tokens with a score and a type each,
    which can spell every text.

    llama.cpp aborts the process on a duplicate token, and reads past the end of a list that is too
    short. It reports a missing token list itself.
    """
    if _TOKENS not in metadata:
        return
    for key in (_TOKENS, _MERGES):
        if key in metadata and metadata.type_name(key) != "arr[str]":
            raise GgufError(
                f"{path} has {metadata.type_name(key)} in {key}, not strings: {_REMEDY}"
            )
    n_tokens = metadata.array_length(_TOKENS)
    if n_tokens != num_tokens:
        raise GgufError(
            f"{path} lists {n_tokens} tokens but has {num_tokens} embeddings: {_REMEDY}"
        )
    for key in _ONE_EACH:
        if key in metadata and metadata.array_length(key) != n_tokens:
            raise GgufError(
                f"{path} has {metadata.array_length(key) or 1} values in {key} for {n_tokens} "
                f"tokens: {_REMEDY}"
            )
    tokens = cast(list[str], metadata[_TOKENS])
    distinct = set(tokens)
    if len(distinct) != len(tokens):
        _check_distinct(path, tokens)
    if metadata.get(_KIND) == _SENTENCEPIECE:
        _check_bytes(path, distinct)
    if metadata.array_length(_TABLE) and metadata.type_name(_TABLE) in ("arr[i8]", "arr[u8]"):
        values = np.asarray(cast(list[int], metadata[_TABLE]))
        _check_table(path, values.astype(np.uint8).tobytes())


def _check_distinct(path: Path, tokens: list[str]) -> None:
    counts = Counter(token for token in tokens if token)  # empty ones are given names
    token, n_times = counts.most_common(1)[0] if counts else ("", 1)
    if n_times > 1:
        raise GgufError(f"{path} lists the token {token!r:.60} {n_times} times: {_REMEDY}")


def _check_bytes(path: Path, tokens: Set[str]) -> None:
    """Raise GgufError if a byte has no token: text without a token is spelled in bytes, and
    llama.cpp ends the process on a byte without one."""
    missing = [byte for byte in range(256) if not _spellings(byte) & tokens]
    if missing:
        raise GgufError(
            f"{path} has no tokens for {len(missing)} of 256 bytes (<0x{missing[0]:02X}> is the "
            "first), so that llama.cpp cannot spell every text: convert the original model again"
        )


def _spellings(byte: int) -> set[str]:
    """Return the tokens that llama.cpp accepts for a byte; it reads strings up to a zero byte."""
    name = f"<0x{byte:02X}>"
    return {name, bytes([byte]).decode("utf-8", "surrogateescape")} if byte else {name}


def _check_table(path: Path, table: bytes) -> None:
    """Raise GgufError if sentencepiece's table of normalised characters has references outside of
    itself, on which llama.cpp ends the process.

    The table is a double array (Kanda 2018) after its length in bytes, followed by the
    zero-terminated strings that its leaves refer to.
    """
    n_bytes = int.from_bytes(table[:4], "little")
    n_units, strings = n_bytes // 4, table[4 + n_bytes :]
    if not n_units or not strings:
        return  # none, or one that llama.cpp refuses
    units = np.frombuffer(table, "<u4", n_units, 4)
    inner = units >> 31 == 0  # the others are leaves: only their value is read
    below = ((units >> 10) << ((units & 512) >> 6)) ^ np.arange(n_units, dtype=np.uint32)
    if not units[0] >> 31 and bool(((below[inner] | 255) < n_units).all()):
        named = units[below[inner & (units >> 8 & 1 == 1)]] & 0x7FFFFFFF
        if strings.endswith(b"\0") and not (named >= len(strings)).any():
            return
    raise GgufError(f"{path} has a {_TABLE} that leads outside of itself: {_REMEDY}")
