"""Entry point of `specdec-bench`; imports next to nothing, as `specdec.cli.entry` does."""

from __future__ import annotations

import os

from specdec.cli.entry import bench_main, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.cli.entry import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # `specdec demo` becomes this program, and keeps its name
    # (specdec.cli.enforce.COMMAND_NAME; importing that would import more than next to nothing).
    name = os.environ.pop("SPECDEC_COMMAND_NAME", "specdec-bench")

    def load() -> Run:
        from bench.commands.app import main as run

        return lambda argv: run(argv, name)

    return run_command(name, load, argv)


if __name__ == "__main__":
    raise SystemExit(bench_main())
