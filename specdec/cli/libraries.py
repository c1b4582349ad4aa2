"""Import of the libraries that run a model, without garbage collection, and their verbosity."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.cli.output import say
from specdec.models.names import has_own_files
from specdec.models.opened import import_libraries
from specdec.run_options import RunOptions

_UNUSED = ("accelerate", "scipy")
"""Optional imports of transformers that inference does not need."""
_OURS = [logging.getLogger(name) for name in ("offload", "backends", "specdec")]


class _Notes(logging.Handler):
    """Handler that prints our own warnings as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


def quiet_libraries() -> None:
    """Silence hints, warnings and progress bars of torch and transformers.

    A user's TRANSFORMERS_VERBOSITY is respected.
    """
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        logging.getLogger("transformers").setLevel(logging.ERROR)  # if it is imported already
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for logger in _OURS:
        logger.setLevel(logging.WARNING)
        if not any(isinstance(handler, _Notes) for handler in logger.handlers):
            logger.addHandler(_Notes())
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)\b")


def loud_libraries() -> None:
    """Show the libraries' warnings, and our own info messages."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "warning"
    logging.getLogger("transformers").setLevel(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0"
    for logger in _OURS:
        logger.setLevel(logging.INFO)
    warnings.filterwarnings("default", module=r"(torch|transformers|huggingface_hub)\b")


def import_for_good(load: RunOptions) -> None:
    """Import the libraries of these models, and exempt them from garbage collection.

    Torch and transformers make a million objects, all of which stay. Collecting them took half a
    second during import, and a third of a second each time that a plan asks what memory is in
    use. Raises ModelNotFound.
    """
    if "torch" in sys.modules:
        return  # the caller imported it, and owns its objects
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in (load.model, load.draft):
            if name is not None and has_own_files(name):
                with _unused_left_out():
                    import_libraries(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _unused_left_out() -> Iterator[None]:
    """Block unused imports, which take a tenth of the time of importing torch and transformers."""
    left_out = [name for name in _UNUSED if name not in sys.modules]
    for name in left_out:  # as if they were not installed
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in left_out:
            del sys.modules[name]
