"""Smallest budget of a grown model that has not been written yet.

A stand-in with the same headers, and holes for the weights, takes no space on disk and suffices for
planning. Planning runs in a process of its own, whose memory is part of the budget.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process.child import measure_for_parent, result_of_child
from bench.synth.shapes import Storage, SynthError
from bench.synth.sizing import choose_shape
from offload.errors import SpecdecError


class StandInError(SpecdecError):
    """Model that cannot be planned."""


@dataclass(frozen=True)
class StandIn:
    """Model as `specdec-bench synth` would grow it, and its draft."""

    source: str
    format: str
    dtype: str
    n_bytes: int
    vocab_size: int
    draft: str
    ctx_size: int
    """Context size in tokens."""


def smallest_budget(stand_in: StandIn) -> int | None:
    """Return bytes, with default options of a run; None if no such model can be grown.

    Raises:
        StandInError: planning failed; has its reason.
    """
    result = result_of_child("bench.synth.stand_in", stand_in, None)
    if result["problem"] is not None:
        raise StandInError(result["problem"])
    n_bytes: int | None = result["smallest_bytes"]
    return n_bytes


def _plan(stand_in: StandIn) -> int:
    from specdec.planning.memory.base import measure_base
    from specdec.planning.memory.planner import MemoryPlanner
    from specdec.planning.opening import open_pair
    from specdec.run_options import RunOptions

    with tempfile.TemporaryDirectory(prefix="specdec-stand-in-") as folder:
        target = _grow(stand_in, Path(folder))
        options = RunOptions(target, stand_in.draft, ctx_size=stand_in.ctx_size)
        pair = open_pair(options)
        return MemoryPlanner(*pair.sources, options, measure_base()).smallest.host_bytes


def _grow(stand_in: StandIn, folder: Path) -> Path:
    from bench.synth.checkpoint import grow
    from bench.synth.gguf import grow_gguf
    from bench.synth.layouts import LAYOUTS
    from bench.synth.recipes import RECIPES
    from bench.synth.source import SourceModel
    from specdec.models.names import resolve_model

    is_gguf = stand_in.format == "gguf"
    source, dtype, vocab_size = resolve_model(stand_in.source), stand_in.dtype, stand_in.vocab_size
    storage: Storage = RECIPES[dtype] if is_gguf else LAYOUTS[dtype]
    small = SourceModel(source).shape
    shape = choose_shape(small, None, stand_in.n_bytes, vocab_size, storage)
    target = folder / ("target.gguf" if is_gguf else "target")
    write = grow_gguf if is_gguf else grow
    return write(source, target, shape, vocab_size=vocab_size, dtype=dtype, with_data=False).path


def measure(stand_in: StandIn) -> dict[str, Any]:
    """Return the result of `smallest_budget`, or the problem."""
    try:
        return {"smallest_bytes": _plan(stand_in), "problem": None}
    except SynthError:
        return {"smallest_bytes": None, "problem": None}
    except SpecdecError as error:
        return {"smallest_bytes": None, "problem": str(error)}


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], lambda values: measure(StandIn(**values))))
