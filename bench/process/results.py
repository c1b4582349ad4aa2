"""Result files, written whole or line by line; reading detects their kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError

PEERS, SPEEDUP, SWEEP = "peers", "speedup", "sweep"
CURVE, POLICY, PICTURE = "curve", "policy", "picture"
_PNG = b"\x89PNG\r\n\x1a\n"


class ResultsError(SpecdecError):
    """Invalid result file, or one that cannot be written."""


class NoResults(ResultsError):
    """A file that can be read and holds something else."""


@dataclass(frozen=True)
class Record:
    """Record of one prompt, decoded once by any program: the source of all results."""

    prompt: str
    mode: str = ""
    """Decoding mode, if there are several."""
    category: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the prompt was handed over, number of tokens that arrived together)."""
    finish_reason: str = ""
    text: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    """Values of a `GenerationStats`; only of specdec."""
    pass_times: list[Any] = field(default_factory=list)
    """(tokens, seconds, whether a draft ran in parallel) of every decode pass."""
    bytes_read: list[int] | None = None
    """Bytes read from storage at the start, at the first token and at the end, if measured."""
    storage_bytes_per_second: float = 0.0
    """Mean of the probes just before and just after; 0 if not probed."""


@dataclass(frozen=True)
class Results:
    """Contents of one file."""

    path: Path
    kind: str
    """PEERS, SPEEDUP, SWEEP, CURVE, POLICY or PICTURE."""
    value: dict[str, Any]
    """JSON object of the file; for a sweep {"settings": [its lines]}."""
    png: bytes = b""
    """Data of a picture, such as `specdec-bench timeline` draws."""
    given_name: str = ""

    @property
    def name(self) -> str:
        """Name for headings and picture files."""
        return self.given_name or self.path.stem


def write_json(result: Mapping[str, Any], path: Path | None) -> None:
    """Write JSON to a file, or to stdout."""
    text = json.dumps(result, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    write_whole(path, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically through a temporary file; a device or a pipe is written to directly.

    Symbolic links are followed. Raises ResultsError.
    """
    try:
        if path.exists() and not path.is_file():  # e.g. /dev/null, which must not be replaced
            path.write_bytes(data)
            return
        path = path.resolve()
        partial = path.with_name(path.name + ".part")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ResultsError(
            f"cannot write {path}: {error.strerror}; name a file on a disk with free space"
        ) from error


def append_line(value: Mapping[str, Any], path: Path) -> None:
    """Append one line of JSON Lines at once, so that an interrupted measurement keeps it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def read_all(paths: Iterable[Path]) -> list[Results]:
    """Return `read_results` of each; files with the name of an earlier one get a number."""
    result: dict[str, Results] = {}
    for path in paths:
        names = chain([path.stem], (f"{path.stem}-{n}" for n in count(2)))
        name = next(name for name in names if name not in result)
        result[name] = replace(read_results(path), given_name=name)
    return list(result.values())


def read_results(path: Path) -> Results:
    """Read a file of any kind.

    Raises:
        ResultsError: it cannot be read or holds something else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    if data.startswith(_PNG):
        return Results(path, PICTURE, {}, data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise _unknown(path) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Results(path, SWEEP, {"settings": _sweep_lines(path, text)})
    kind = _kind(value)
    if kind is None:
        raise _unknown(path)
    return Results(path, kind, {"settings": [value]} if kind == SWEEP else value)


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("peers"), list):
        return PEERS
    if {"plain", "speculative", "records"} <= set(value):
        return SPEEDUP
    if isinstance(value.get("points"), list):
        return CURVE
    if {"rows", "best_fixed"} <= set(value):
        return POLICY
    return SWEEP if "setting" in value else None


def _sweep_lines(path: Path, text: str) -> list[dict[str, Any]]:
    """Return the lines of a sweep; a last one that was cut off is left out."""
    lines = text.splitlines()
    result: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and result:
                continue
            raise _unknown(path) from None
        if _kind(value) != SWEEP:
            raise _unknown(path)
        result.append(value)
    if not result:
        raise _unknown(path)
    return result


def _unknown(path: Path) -> NoResults:
    return NoResults(
        f"{path} holds no results: give JSON of specdec-bench peers, speedup, curve or policy, "
        "JSON lines of sweep, or the PNG of timeline"
    )
