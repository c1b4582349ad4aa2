"""Whether a stranger's grammar can be prepared at all: tried in a process that may be lost.

llguidance limits what following a grammar costs, not what preparing it does: the intersection of
twenty patterns doubles time and memory with each of them, and no call of its comes back.
"""

from __future__ import annotations

import subprocess
import sys

from offload.process.expendable import allow_cpu_seconds, become_expendable, command_of
from specdec.grammar.constraint import Constraint, in_one_line, llguidance
from specdec.grammar.kept import Kept

MOST_BYTES = 256 << 20
MOST_CPU_SECONDS = 5
_MOST_WALL_SECONDS = 60  # of a machine that is busy elsewhere
_REFUSED = 3


def check_cost(constraint: Constraint) -> None:
    """Raises ConfigError where it cannot be prepared, or not within the limits."""
    _PASSED(constraint)


def _try(constraint: Constraint) -> None:
    llguidance()
    argv = [*command_of(__name__), constraint.kind]
    try:
        done = subprocess.run(
            argv,
            input=constraint.text.encode(),
            capture_output=True,
            start_new_session=True,  # a terminal's Ctrl-C is not for it
            timeout=_MOST_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise constraint.refuse(_TOO_MUCH) from error
    if done.returncode == _REFUSED:
        raise constraint.refuse(done.stdout.decode())
    if done.returncode:
        raise constraint.refuse(_TOO_MUCH)


_PASSED = Kept(_try, most=64)
_TOO_MUCH = (
    f"it takes more than {MOST_CPU_SECONDS} s or {MOST_BYTES >> 20} MiB to prepare: "
    "ask for fewer patterns and alternatives at one place"
)


def main() -> int:
    become_expendable(MOST_BYTES)
    allow_cpu_seconds(MOST_CPU_SECONDS)
    constraint = Constraint(sys.argv[1], sys.stdin.read())
    try:
        grammar = constraint.grammar
    except ValueError as error:
        reason = str(error).partition("cannot be kept to: ")[2] or str(error)
        print(in_one_line(reason))
        return _REFUSED
    library = llguidance()
    library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    return 0
