"""Fresh processes for measurements, inside a memory limit or not.

The specification is passed as JSON, and the result is returned as JSON:

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
"""Function from a specification (JSON values) to a result (JSON values)."""


class ChildFailed(SpecdecError):
    """Measuring process that ended without a result."""


def result_of_child(
    module: str,
    spec: DataclassInstance,
    memory_limit: str | int | None,
) -> dict[str, Any]:
    """Run `module` in a process of its own, and return the result of its `measure_for_parent`.

    Args:
        spec: specification; its fields are JSON values.
        memory_limit: limit of a cgroup; None for no limit.

    Raises:
        typer.Exit: with the child's exit code, if the child has reported its error.
        ChildFailed: the child ended without a report.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        spec_path, result_path = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        code = run_child(module, [str(spec_path), str(result_path)], memory_limit)
        check_child(code, "the measurement")
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return result


def run_child(module: str, argv: Sequence[str], memory_limit: str | int | None) -> int:
    """Run `python -m module argv...` and return its exit code; None means no memory limit.

    The child shares our terminal, and never outlives this process.
    """
    if memory_limit is not None:
        return run_enforced(module, argv, memory_limit)
    return run_limited([sys.executable, "-m", module, *argv], env=child_environment()).code


def measure_for_parent(argv: Sequence[str], measure: Measure) -> int:
    """Run as the child of `result_of_child`, and return the exit code.

    Args:
        argv: file of the specification, file for the result.
        measure: function from the specification to the result.
    """

    def work() -> None:
        spec_path, result_path = map(Path, argv)
        try:
            result = measure(json.loads(spec_path.read_text(encoding="utf-8")))
        except KeyboardInterrupt:  # the parent got it too, and reports it
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
    """Drop the page cache of files, after writing back dirty pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def check_child(code: int, what: str) -> None:
    """Raise for a child that failed; one that has reported its error gives its exit code.

    Raises:
        KeyboardInterrupt: the child was interrupted.
        typer.Exit: the child has reported its error.
        ChildFailed: the child ended without a report.
    """
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code in (EXIT_ERROR, KILLED):
        raise typer.Exit(code)
    if code != 0:
        raise ChildFailed(f"{what} failed with exit code {code}")
