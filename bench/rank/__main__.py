"""Entry point of `specdec check --rank`, which execs this program: it cannot import `bench`.

Imports next to nothing, as `specdec.cli.entry` does, so that Ctrl-C is one line from the start.
"""

from __future__ import annotations

import os

from specdec.cli.entry import run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.cli.entry import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    name = os.environ.pop("SPECDEC_COMMAND_NAME", "bench.rank")

    def load() -> Run:
        from bench.rank.command import main as run

        return lambda argv: run(argv, name)

    return run_command(name, load, argv)


if __name__ == "__main__":
    raise SystemExit(main())
