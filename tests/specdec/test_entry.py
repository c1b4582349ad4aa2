"""Ctrl-C before the command line is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from specdec.entry import main
sys.exit(main(["--version"]))
"""


@pytest.mark.parametrize("module", ["specdec.cli", "typer", "specdec.cli_run"])
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str) -> None:
    code = AT_IMPORT.format(module=module)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert run.returncode == 130
    assert run.stderr == b"specdec: interrupted\n"


def test_next_to_nothing_is_imported_before_ctrl_c_is_caught() -> None:
    code = (
        "import sys; before = set(sys.modules); import specdec.entry; "
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    imported = set(run.stdout.split())
    assert {"specdec", "specdec.entry"} <= imported
    assert not {"typing", "pathlib", "contextlib", "re", "importlib.util"} & imported
