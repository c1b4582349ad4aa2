"""The one base class of every error that a user may see.

The command line prints such an error as one line and exits with status 2; anything else is a bug
and keeps its traceback. Subclasses live beside the code that raises them.
"""

from __future__ import annotations


class SpecdecError(Exception):
    """An error that a user may see: what is wrong, the figure, and the remedy, in one line."""
