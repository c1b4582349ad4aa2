"""Libraries stay silent on the command line: what matters is told by our own lines."""

from __future__ import annotations

import logging
import os
import warnings

from specdec.cli.output import say

_OURS = [logging.getLogger(name) for name in ("offload", "backends", "specdec")]


class _Notes(logging.Handler):
    """Our own warnings, as lines of the command line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


def quiet_libraries() -> None:
    """No hints, warnings and progress bars of torch and transformers on stderr.

    Whoever sets TRANSFORMERS_VERBOSITY wants to see them.
    """
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        logging.getLogger("transformers").setLevel(logging.ERROR)  # where it is imported already
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for logger in _OURS:
        if not any(isinstance(one, _Notes) for one in logger.handlers):
            logger.addHandler(_Notes(logging.WARNING))
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)\b")
