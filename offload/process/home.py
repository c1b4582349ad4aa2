"""The user's home folder."""

from __future__ import annotations

from pathlib import Path

from offload.errors import SpecdecError


class NoHome(SpecdecError):
    """Something lies in the user's home folder, but the user has none."""


def home_folder() -> Path:
    """Return the home folder. Raises NoHome, e.g. for a user id that /etc/passwd does not have."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise NoHome("this user has no home folder: set HOME to a folder") from error
