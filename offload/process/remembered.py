"""Figures about this machine, kept from run to run: one that is lost is only found out again."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specdec, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "specdec"


def recall(path: Path) -> Any:
    """What `remember` wrote there, of any form; None where there is nothing to read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def remember(path: Path, value: Mapping[str, Any], name: str) -> None:
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
            path.parent,
            error.strerror or error,
        )
