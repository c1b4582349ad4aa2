"""Opening of files that a user names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def open_now(path: Path) -> BinaryIO:
    """Open a file or pipe to read it, without waiting for a writer: without one a pipe is empty.

    Raises OSError.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    file = open(path, "rb", opener=opener)  # noqa: SIM115  # for the caller to close
    os.set_blocking(file.fileno(), True)  # wait for the data of a writer that is there
    return file
