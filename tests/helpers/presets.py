"""Servers of several models in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving import Server


def preset(folder: Path, text: str) -> Path:
    path = folder / "preset.toml"
    path.write_text(text)
    return path


class PresetServer(Server):
    """A server of a preset."""

    def __init__(self, path: Path, *more: str) -> None:
        super().__init__("", "--preset", str(path), *more)

    def _start(self, argv: list[str], environment: dict[str, str]) -> Any:
        at = argv.index("-m")
        return super()._start(argv[:at] + argv[at + 2 :], environment)
