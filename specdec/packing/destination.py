"""Destination of a packed copy, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.packed.errors import PackError


def place_of(out: str | Path) -> Path:
    """Return the path of the folder `out` without links. Raises PackError if it cannot be created.

    Errors that only writing shows, such as a full disk, are raised later.
    """
    try:
        path = Path(out).expanduser()
        place = path.resolve()
        if path.is_symlink() and not place.exists():
            raise PackError(
                f"{out} is a link that leads nowhere: name another folder, or remove it"
            )
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise PackError(f"{out} is there already: name another folder, or remove it")
        if os.path.ismount(place):  # no folder can be moved there
            raise PackError(f"{out} is where a file system is mounted: name a folder in it")
        above = next(parent for parent in place.parents if parent.exists())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~ of nobody, a circle
        raise _cannot_write(out, error) from error
    if not above.is_dir():
        raise PackError(f"cannot write {out}: {above} is a file: name a folder elsewhere")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PackError(f"cannot write {out}: {above} cannot be written: name a folder elsewhere")
    return place


def refuse_inside(out: Path, place: Path, source: Path) -> None:
    """Raise PackError for a copy inside the model's own folder."""
    if source.resolve() in place.parents:
        raise PackError(f"{out} lies in the model's own folder: name one outside of it")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn the block's OSError into a PackError."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(out, error) from error


def _cannot_write(out: str | Path, error: Exception) -> PackError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return PackError(f"cannot write {out}: {reason}")
