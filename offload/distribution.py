"""Name of the distribution that installs these packages, and of its extras.

The name `specdec` on PyPI is another project's, so the distribution has a longer one; the import
and the command are `specdec`.
"""

from __future__ import annotations

DISTRIBUTION = "specdec-stream"
"""`[project] name` in pyproject.toml (tested)."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to an installed specdec.

    pip takes the installed specdec for it, also one from a checkout.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
