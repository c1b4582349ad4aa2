"""The libraries that run a model, imported as a command does it that ends with its process."""

from __future__ import annotations

import gc
import sys

from specdec.models.names import is_self_draft
from specdec.models.opened import import_libraries
from specdec.planning.run_options import RunOptions


def import_for_good(load: RunOptions) -> None:
    """Import what runs these models, and never search it for garbage.

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
                import_libraries(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
