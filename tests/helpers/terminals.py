"""A terminal to type in: a tmux server of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_COLUMNS, _LINES = 100, 60
_SECONDS = 120.0


class Terminal:
    """A terminal in which `specdec` runs; it ends with its exit code on the screen."""

    def __init__(
        self, folder: Path, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("needs tmux: apt-get install tmux")
        self._socket = str(folder / "tmux")
        values = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        values |= {name: str(folder) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
        assignments = [
            f"{name}={value}" for name, value in {**values, **(environment or {})}.items()
        ]
        command = shlex.join(["env", *assignments, sys.executable, "-m", "specdec", *argv])
        shell = f"{command}; echo exit code $?; cat"
        size = ["-x", str(_COLUMNS), "-y", str(_LINES)]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, shell)

    def _tmux(self, *argv: str, text: str | None = None) -> str:
        command = ["tmux", "-S", self._socket, *argv]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, Left, C-c."""
        self._tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste as terminals do: with brackets around it, if the program asked for them."""
        self._tmux("load-buffer", "-", text=text)
        self._tmux("paste-buffer", "-p")

    def screen(self) -> str:
        """Return what is shown, and what was above it; lines without spaces at their ends."""
        text = self._tmux("capture-pane", "-p", "-J", "-S", "-")
        return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()

    def wait_for(self, text: str, n_times: int = 1) -> str:
        """Return the screen that shows a text so many times."""
        end = time.monotonic() + _SECONDS
        while (screen := self.screen()).count(text) < n_times:
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{screen}"
            time.sleep(0.05)
        return screen

    def wait_for_prompt(self) -> str:
        """Return the screen whose last line is an empty prompt."""
        end = time.monotonic() + _SECONDS
        while not (screen := self.screen()).endswith("\n>"):
            assert time.monotonic() < end, f"no prompt on the screen:\n{screen}"
            time.sleep(0.05)
        return screen

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True)
