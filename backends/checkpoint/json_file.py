"""Faults of a checkpoint's JSON files in words of their own, for errors that a library reports."""

from __future__ import annotations

import json
from pathlib import Path


def json_fault(path: Path) -> str | None:
    """Return why a file is no JSON object, to follow its name; None if it is one, or is missing."""
    try:
        text = path.read_bytes().decode("utf-8") if path.is_file() else "{}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return f"is no UTF-8 text (byte {error.start})"
    if not text.strip():
        return "is empty"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"is not valid JSON (line {error.lineno}, column {error.colno})"
    except (ValueError, RecursionError):  # a number of too many digits; too many brackets
        return "is not valid JSON"
    return None if isinstance(value, dict) else "is no JSON object"
