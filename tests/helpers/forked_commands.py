"""Commands of specdec, each in a process of its own that costs no start: forks of one which has
imported what they need. A command may end its process in any way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """The end of a command: negative codes are signals."""

    code: int
    out: str
    err: str


class ForkedCommands:
    """A process whose forks run commands, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(ROOT)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, argv: Sequence[str], stdin: str = "") -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([list(argv), stdin]), file=self._process.stdin, flush=True)
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate("")


_NOWHERE = "/nowhere/model.gguf"
_REFUSED = (
    ["run", "-m", _NOWHERE, "-p", "x"],
    ["check", "-m", _NOWHERE, "-md", _NOWHERE],
    ["batch", "-m", _NOWHERE, "/nowhere/in.jsonl", "-o", "/nowhere/out.jsonl"],
    ["serve", "-m", _NOWHERE, "--port", "0"],
)


def _run_here(main, argv: list[str]) -> None:
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        assert main(argv) == 2


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    sys.path.insert(0, sys.argv[1])
    import backends.llama.source  # noqa: F401
    import specdec.text.gguf_tokenizer  # noqa: F401
    from backends.ggml.library import load_library
    from specdec.cli.app import main

    load_library()
    for argv in _REFUSED:  # the forks already have the imports of a start
        _run_here(main, argv)
    for line in sys.stdin:
        argv, stdin = json.loads(line)
        print(json.dumps(_run(main, argv, stdin)), file=answers, flush=True)


def _run(main, argv: list[str], stdin: str) -> tuple[int, str, str]:
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            for number, file in enumerate((given, out, err)):
                os.dup2(file.fileno(), number)
            sys.stdin = os.fdopen(0, closefd=False)
            code = 1
            try:
                code = main(argv)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, *(_content(file) for file in (out, err))


def _content(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    _serve()
