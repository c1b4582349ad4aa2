"""Files that a user names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def open_now(path: Path) -> BinaryIO:
    """Open a file to read it, a pipe too; one that nobody writes to is empty, and not waited for.

    Raises OSError.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    file = open(path, "rb", opener=opener)  # noqa: SIM115  # for the caller to close
    os.set_blocking(file.fileno(), True)  # a writer that is there is waited for
    return file
