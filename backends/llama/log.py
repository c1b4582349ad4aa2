"""The log of llama.cpp, which is the only place where it says why it refuses something."""

from __future__ import annotations

import threading
from collections import deque

_INFO, _ERROR, _CONTINUED = 2, 4, 5  # ggml_log_level


class LlamaLog:
    """The last lines that llama.cpp logged, of level INFO and above."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=400)
        self._partial: tuple[int, str] = (_INFO, "")
        self._lock = threading.Lock()

    def write(self, level: int, text: bytes | None) -> None:
        with self._lock:
            before, start = self._partial
            if level == _CONTINUED:
                level = before
            *whole, rest = (start + (text or b"").decode("utf-8", "replace")).split("\n")
            self._partial = (level, rest)
            self._lines.extend((level, line.strip()) for line in whole if level >= _INFO)

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()

    def lines(self, level: int = _INFO) -> list[str]:
        with self._lock:
            return [line for its_level, line in self._lines if its_level >= level and line]

    def reason(self) -> str:
        """The last errors in one line: llama.cpp logs the cause before its consequences."""
        return "; ".join(self.lines(_ERROR)[-3:]) or "no reason was logged"
