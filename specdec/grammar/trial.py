"""Trial of an untrusted grammar: it is compiled in an expendable process with limits.

llguidance limits the cost of following a grammar, not of compiling it: the intersection of twenty
patterns doubles time and memory with each of them, and such a call never returns.
"""

from __future__ import annotations

import subprocess
import sys

from offload.process.expendable import allow_cpu_seconds, become_expendable, command_of
from specdec.grammar.cached import Cached
from specdec.grammar.constraint import Constraint, in_one_line, llguidance

MAX_BYTES = 256 << 20
MAX_CPU_SECONDS = 5
_MAX_WALL_SECONDS = 60  # generous, for a machine that is busy otherwise
_REFUSED = 3


def check_cost(constraint: Constraint) -> None:
    """Raise ConfigError where the constraint cannot be compiled within the limits."""
    _PASSED(constraint)


def _try(constraint: Constraint) -> None:
    llguidance(constraint.kind)
    argv = [*command_of(__name__), constraint.kind]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a terminal's Ctrl-C does not reach it
    ) as process:
        _RUNNING.add(process)
        try:
            output, _ = process.communicate(constraint.text.encode(), _MAX_WALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise constraint.refuse(_TOO_MUCH) from error
        finally:
            process.kill()
            _RUNNING.discard(process)
    if process.returncode == _REFUSED:
        raise constraint.refuse(output.decode())
    if process.returncode:
        raise constraint.refuse(_TOO_MUCH)


def end_trials() -> None:
    """Kill the running trials; their constraints are refused as taking too much."""
    for process in list(_RUNNING):
        process.kill()


_RUNNING: set[subprocess.Popen[bytes]] = set()
_PASSED = Cached(_try, limit=64)
_TOO_MUCH = (
    f"it takes more than {MAX_CPU_SECONDS} s or {MAX_BYTES >> 20} MiB to prepare: "
    "ask for fewer patterns and alternatives at one place"
)


def main() -> int:
    become_expendable(MAX_BYTES)
    allow_cpu_seconds(MAX_CPU_SECONDS)
    constraint = Constraint(sys.argv[1], sys.stdin.read())
    try:
        grammar = constraint.grammar
    except ValueError as error:
        reason = str(error).partition("cannot be kept to: ")[2] or str(error)
        print(in_one_line(reason))
        return _REFUSED
    library = llguidance(constraint.kind)
    library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    return 0
