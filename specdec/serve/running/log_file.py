"""The file of `specdec serve --log-file`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path

from specdec.checks import ConfigError, FieldName


class _LogFile(WatchedFileHandler):
    """Appends lines with their time; opens the file anew once it was renamed or removed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; ignore a file that cannot be opened anew, as without its folder."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: it must not end the server, nor fill its stderr."""


def open_log(path: Path) -> Callable[[str], None]:
    """Return a function that writes a line to the file. Raises ConfigError."""
    try:
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError("cannot write ", FieldName("log_file"), f" {path}: {reason}") from error
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    logger = logging.Logger("specdec.serve.log")  # apart from those that -v and libraries set up
    logger.addHandler(handler)
    return lambda line: logger.info("%s", line)
