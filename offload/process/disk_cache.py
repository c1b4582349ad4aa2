"""Figures about this machine, kept from run to run: one that is lost is only found out again.

A measured figure is kept for a month, or until passes contradict what was predicted from it.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.process.home import home_folder

logger = logging.getLogger(__name__)

_MAX_AGE_SECONDS = 30 * 86400
_in_use: set[Path] = set()
"""Files of the figures that this process has measured or recalled."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specdec, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else home_folder() / ".cache") / "specdec"


def load_cached(path: Path) -> Any:
    """What `remember` wrote there, of any form; None where there is nothing to read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def save_cached(path: Path, value: Mapping[str, Any], name: str) -> None:
    """Write `value` as JSON. Where that fails, say so; `name` begins the line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process must never see half a file: write aside, then rename.
        descriptor, aside = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file)
            os.replace(aside, path)
        except OSError:
            os.unlink(aside)
            raise
    except OSError as error:
        logger.warning(
            "%s is not kept: %s: %s; set XDG_CACHE_HOME to a folder that can be written",
            name,
            error.filename2 or path.parent,  # what is in the file's own place, or in its folder's
            error.strerror or error,
        )


def load_cached_figure(path: Path) -> dict[str, Any] | None:
    """What `remember_figure` wrote there, with `measured_at`; None where that is a month ago."""
    figure = load_cached(path)
    measured_at = figure.get("measured_at") if isinstance(figure, dict) else None
    if not isinstance(measured_at, int | float):
        return None
    if not 0 <= time.time() - measured_at < _MAX_AGE_SECONDS:
        return None
    _in_use.add(path)
    return dict(figure)


def save_cached_figure(path: Path, figure: Mapping[str, Any], name: str) -> None:
    """Keep a figure that was measured now; `name` begins the line where that fails."""
    save_cached(path, {"measured_at": time.time(), **figure}, name)
    _in_use.add(path)


def forget_figures() -> None:
    """Those that this process goes by are contradicted: let the next one measure anew."""
    for path in _in_use:
        with suppress(OSError):
            path.unlink()
    _in_use.clear()
