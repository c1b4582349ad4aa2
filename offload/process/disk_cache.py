"""Disk cache of measurements of this machine, shared by runs: a lost one is measured again.

A measurement is valid for a month, or until forward passes contradict a prediction from it.
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
"""Files of the measurements that this process has saved or loaded."""


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/specdec, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else home_folder() / ".cache") / "specdec"


def load_cached(path: Path) -> Any:
    """Return what `save_cached` wrote there, of any form; None if there is nothing to read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def save_cached(path: Path, value: Mapping[str, Any], name: str) -> None:
    """Write `value` as JSON. If that fails, log a warning that begins with `name`."""
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
            "%s is not cached: %s: %s; set XDG_CACHE_HOME to a folder that can be written",
            name,
            error.filename2 or path.parent,  # the obstacle: at the file's own path, or its folder
            error.strerror or error,
        )


def load_cached_measurement(path: Path) -> dict[str, Any] | None:
    """Return what `save_cached_figure` wrote, with `measured_at`; None if older than a month."""
    figure = load_cached(path)
    measured_at = figure.get("measured_at") if isinstance(figure, dict) else None
    if not isinstance(measured_at, int | float):
        return None
    if not 0 <= time.time() - measured_at < _MAX_AGE_SECONDS:
        return None
    _in_use.add(path)
    return dict(figure)


def save_cached_measurement(path: Path, figure: Mapping[str, Any], name: str) -> None:
    """Save a figure that was measured now; a warning that it failed begins with `name`."""
    save_cached(path, {"measured_at": time.time(), **figure}, name)
    _in_use.add(path)


def forget_measurements() -> None:
    """Delete the figures in use, which were contradicted: the next process measures anew."""
    for path in _in_use:
        with suppress(OSError):
            path.unlink()
    _in_use.clear()
