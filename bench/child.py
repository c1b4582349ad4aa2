"""Fresh processes for measurements, inside a memory limit or not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from offload.errors import SpecdecError
from specdec.cli_errors import EXIT_ERROR, EXIT_INTERRUPTED
from specdec.enforce import KILLED as KILLED
from specdec.enforce import run_child as run_child
from specdec.storage import weight_files


class ChildFailed(SpecdecError):
    """A measuring process ended without a result."""


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
        typer.Exit: nothing more is to be said.
        ChildFailed: it ended without a word.
    """
    if code in (EXIT_INTERRUPTED, EXIT_ERROR, KILLED):
        raise typer.Exit(code)
    if code != 0:
        raise ChildFailed(f"{what} failed with exit code {code}")


def quiet_libraries() -> None:
    """No progress bars and notices of the libraries in children: our own are enough."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
