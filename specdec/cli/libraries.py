"""The libraries that run a model: imported for good by a command that ends with its process, and
silent, for what matters is told by our own lines."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.cli.output import say
from specdec.models.names import is_self_draft
from specdec.models.opened import import_libraries
from specdec.run_options import RunOptions

_UNUSED = ("accelerate", "scipy")
"""What transformers imports where it is installed, for training and for whole models in memory."""
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
        logger.setLevel(logging.WARNING)
        if not any(isinstance(handler, _Notes) for handler in logger.handlers):
            logger.addHandler(_Notes())
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)\b")


def loud_libraries() -> None:
    """What they have to say is shown, from their warnings on."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "warning"
    logging.getLogger("transformers").setLevel(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0"
    for logger in _OURS:
        logger.setLevel(logging.INFO)
    warnings.filterwarnings("default", module=r"(torch|transformers|huggingface_hub)\b")


def import_for_good(load: RunOptions) -> None:
    """Import what runs these models and no more, and never search it for garbage.

    Torch and transformers make a million objects, all of which stay. Searching them took half a
    second while they were imported, and a third of one each time that a plan asks what memory is
    in use. Raises ModelNotFound.
    """
    if "torch" in sys.modules:
        return  # somebody else's process, and what it has imported is his
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in (load.model, load.draft):
            if name is not None and not is_self_draft(name):
                with _unused_left_out():
                    import_libraries(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _unused_left_out() -> Iterator[None]:
    """They take a tenth of the seconds of importing torch and transformers."""
    left_out = [name for name in _UNUSED if name not in sys.modules]
    for name in left_out:  # as if they were not installed
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in left_out:
            del sys.modules[name]
