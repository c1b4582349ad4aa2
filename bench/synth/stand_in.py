"""The smallest budget of a grown model that has not been written yet.

A stand-in with the same headers, and holes for the weights, takes no space on disk; planning reads
no more than that. In a process of its own, whose memory is part of the budget.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.synth.shapes import SynthError, choose_shape
from offload.errors import SpecdecError
from specdec.cli.enforce import child_environment
from specdec.cli.errors import guard


class StandInError(SpecdecError):
    """A model could not be planned for."""


@dataclass(frozen=True)
class StandIn:
    """A model as `specdec-bench synth` would grow it, and its draft."""

    source: str
    format: str
    dtype: str
    n_bytes: int
    vocab_size: int
    draft: str


def smallest_budget(stand_in: StandIn) -> int | None:
    """In bytes, with the options of a run left out; None where no such model can be grown.

    Raises:
        StandInError: with the reason that planning gave.
    """
    argv = [sys.executable, "-m", "bench.synth.stand_in", json.dumps(asdict(stand_in))]
    environment = child_environment()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2].removeprefix("specdec-bench: error: ")
        raise StandInError(reason or f"planning failed with exit code {done.returncode}")
    found = json.loads(done.stdout)
    return None if found is None else int(found)


def _plan(stand_in: StandIn) -> int:
    from specdec.planning.division import Divider
    from specdec.planning.plan import open_pair
    from specdec.planning.run_options import RunOptions

    with tempfile.TemporaryDirectory(prefix="specdec-stand-in-") as folder:
        target = _grow(stand_in, Path(folder))
        options = RunOptions(target, stand_in.draft)
        return Divider(*open_pair(options).sources, options).smallest_bytes


def _grow(stand_in: StandIn, folder: Path) -> Path:
    from bench.synth.checkpoint import FORMATS, grow
    from bench.synth.gguf import GGUF_FORMATS, grow_gguf
    from bench.synth.source import SourceModel
    from specdec.models.names import resolve_model

    is_gguf = stand_in.format == "gguf"
    source, dtype, vocab_size = resolve_model(stand_in.source), stand_in.dtype, stand_in.vocab_size
    form = (GGUF_FORMATS if is_gguf else FORMATS)[dtype]
    small = SourceModel(source).shape
    shape = choose_shape(small, None, stand_in.n_bytes, vocab_size, form.bytes_per_weight)
    target = folder / ("target.gguf" if is_gguf else "target")
    write = grow_gguf if is_gguf else grow
    return write(source, target, shape, vocab_size=vocab_size, dtype=dtype, with_data=False).path


def main(argv: list[str]) -> int:
    """What `smallest_budget` runs: prints its result as JSON."""

    def work() -> None:
        try:
            found: int | None = _plan(StandIn(**json.loads(argv[0])))
        except SynthError:
            found = None
        print(json.dumps(found))

    return guard("specdec-bench", work)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
