"""Ctrl-C before the command line is loaded, for both commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
AT_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from {entry} import main
sys.exit(main(["--help"]))
"""


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("specdec.cli.entry", "specdec.cli.app"),
        ("specdec.cli.entry", "specdec.cli.commands.run"),
        ("bench.__main__", "bench.commands.speedup"),
        ("bench.rank.__main__", "bench.rank.ranking"),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(entry: str, module: str) -> None:
    code = AT_IMPORT.format(entry=entry, module=module)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert run.returncode == 130
    name = {"specdec.cli.entry": b"specdec", "bench.__main__": b"specdec-bench"}
    assert run.stderr == name.get(entry, b"bench.rank") + b": interrupted\n"


@pytest.mark.parametrize("entry", ["specdec.cli.entry", "bench.__main__", "bench.rank.__main__"])
def test_next_to_nothing_is_imported_before_ctrl_c_is_caught(entry: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {entry}; "
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    imported = set(run.stdout.split())
    assert {"specdec", "specdec.cli.entry", entry} <= imported
    assert not {"typing", "pathlib", "contextlib", "re", "importlib.util"} & imported


@pytest.mark.parametrize("entry", ["specdec.cli.entry", "bench.__main__"])
def test_the_end_of_the_process_searches_no_garbage(entry: str) -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10000))\n"
        f"from {entry} import main; sys.exit(main(['--version']))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["True"]


@pytest.mark.slow
def test_what_runs_a_model_is_imported_for_good() -> None:
    """Garbage collection of torch's and transformers' objects takes a third of a second, and unused
    imports take a tenth of all import time."""
    code = (
        "import gc, sys\n"
        "from specdec.cli.libraries import import_for_good\n"
        "from specdec.run_options import RunOptions\n"
        "import_for_good(RunOptions('pair:target', 'pair:draft'))\n"
        "print(gc.get_freeze_count() > 200000, gc.isenabled())\n"
        "print({'scipy', 'accelerate'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "True True\nset()\n", run.stderr
