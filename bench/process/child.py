"""Fresh processes for measurements, inside a memory limit or not.

What to measure goes there as JSON, and the result comes back as JSON:

    python -m bench.MODULE SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import SpecdecError
from offload.process.limited import run_limited
from specdec.cli.enforce import KILLED as KILLED
from specdec.cli.enforce import child_environment, run_enforced
from specdec.cli.errors import EXIT_ERROR, EXIT_INTERRUPTED, guard
from specdec.cli.libraries import quiet_libraries
from specdec.models.weight_files import weight_files

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Measure = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Gets a specification as JSON has it; returns what JSON can hold."""


class ChildFailed(SpecdecError):
    """A measuring process ended without a result."""


def result_of_child(
    module: str,
    spec: DataclassInstance,
    memory_limit: str | int | None,
) -> dict[str, Any]:
    """What `measure_for_parent` of `module` writes, run in a process of its own.

    Args:
        spec: what to measure; its fields hold what JSON can.
        memory_limit: of a cgroup; None for no limit.

    Raises:
        typer.Exit: with the child's exit code, where that has told why it failed.
        ChildFailed: it ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        spec_path, result_path = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        code = run_child(module, [str(spec_path), str(result_path)], memory_limit)
        check_child(code, "the measurement")
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return result


def run_child(module: str, argv: Sequence[str], memory_limit: str | int | None) -> int:
    """Run `python -m module argv...` and return its exit code; None means no limit of memory.

    The child shares our terminal, and does not outlive this process, however that ends.
    """
    if memory_limit is not None:
        return run_enforced(module, argv, memory_limit)
    return run_limited([sys.executable, "-m", module, *argv], env=child_environment()).code


def measure_for_parent(argv: Sequence[str], measure: Measure) -> int:
    """The child of `result_of_child`: returns its exit code.

    Args:
        argv: file of the specification, file for the result.
        measure: gets the one, returns the other.
    """

    def work() -> None:
        spec_path, result_path = map(Path, argv)
        try:
            result = measure(json.loads(spec_path.read_text(encoding="utf-8")))
        except KeyboardInterrupt:  # the parent got it too, and says so
            raise typer.Exit(EXIT_INTERRUPTED) from None
        result_path.write_text(json.dumps(result), encoding="utf-8")

    quiet_libraries()
    return guard("specdec-bench", work)


def forget_model(model: Path) -> None:
    """Drop the page cache of a model's files, so that every process begins with cold storage.

    Pages that another process read stay in memory and are charged to its cgroup: a peer that
    reads through the page cache would be served from outside its limit.
    """
    forget_files(weight_files(model))


def forget_files(paths: Iterable[Path]) -> None:
    """Drop the page cache of files; what is not yet written is written first."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # the kernel keeps pages that only memory holds
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def check_child(code: int, what: str) -> None:
    """Raise for a child that failed; one that has told why ends us with the same exit code.

    Raises:
        KeyboardInterrupt: it was interrupted, and we are too.
        typer.Exit: nothing more is to be said.
        ChildFailed: it ended without a word.
    """
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code in (EXIT_ERROR, KILLED):
        raise typer.Exit(code)
    if code != 0:
        raise ChildFailed(f"{what} failed with exit code {code}")
