"""The command line in tests: tiny models to name, runs in this process and in subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import ForkedProcess
from tiny_pair import save_model

from specdec.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
_WITHOUT_TORCH = """
import json, sys
from importlib.abc import MetaPathFinder
class Refusing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch", "transformers"), name
sys.meta_path.insert(0, Refusing())
from {module} import main
for argv in json.loads(sys.argv[1]):
    assert main(argv) == 2, argv
"""


class Models(NamedTuple):
    target: Path
    draft: Path
    other_words: Path
    """A draft with another vocabulary."""

    def run_argv(self, *more: str) -> list[str]:
        return ["run", "-m", str(self.target), "-md", str(self.draft), "--threads", "1", *more]


def save_models(root: Path) -> Models:
    return Models(
        save_model(root / "target", seed=1),
        save_model(root / "draft", seed=1),
        save_model(root / "other", seed=1, first=7),
    )


def expect_error(
    capsys: pytest.CaptureFixture[str], argv: list[str], *parts: str, code: int = 2
) -> None:
    """Expect one line on stderr that names the error, and nothing on stdout."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specdec: error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    for part in parts:
        assert part in err, err


def run_without_torch(module: str, *argvs: Sequence[str]) -> list[str]:
    """Return the refusals of commands when torch and transformers cannot be imported."""
    code = _WITHOUT_TORCH.format(module=module)
    argv = [sys.executable, "-c", code, json.dumps(argvs)]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == len(argvs), run.stderr
    return lines


AnyProcess = ForkedProcess | subprocess.Popen[bytes]


def start(argv: list[str]) -> AnyProcess:
    """Start `specdec` in a forked process."""
    return ForkedProcess(["specdec", *argv], os.environ, text=False)


def start_interpreter(argv: list[str]) -> AnyProcess:
    """Start `specdec` as a user does, including the interpreter's own exit."""
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_output(process: AnyProcess) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1), process.stderr.read() if process.stderr else b""
