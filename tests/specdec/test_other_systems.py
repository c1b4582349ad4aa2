"""Unsupported systems: `import specdec` and every command name the missing feature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from bench.commands.app import app as bench_app
from specdec.cli.app import app as specdec_app

ROOT = Path(specdec.__file__).resolve().parent.parent
SYSTEMS = {
    "darwin": ("macOS has no O_DIRECT", ()),
    "win32": ("Windows has no preadv", ("fcntl", "resource", "pwd", "termios")),
    "freebsd14": ("freebsd14 has no parts of Linux", ()),
}
SCRIPT = (
    "import sys\nfrom specdec.cli.entry import {main}\n"
    "if __name__ == '__main__':\n    sys.exit({main}())\n"
)
SCRIPTS = {"specdec": "main", "specdec-bench": "bench_main"}


def names_in(app):
    return [command.name or command.callback.__name__ for command in app.registered_commands]


def command_lines():
    for module, app in (("specdec", specdec_app), ("bench", bench_app)):
        for arguments in ([], ["--help"], ["--version"], *([name] for name in names_in(app))):
            yield ["-m", module, *arguments]


@pytest.fixture(params=SYSTEMS)
def other_system(request, tmp_path):
    """(run, missing feature): an interpreter that pretends to run on another system."""
    missing, modules = SYSTEMS[request.param]
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.platform = {request.param!r}\n"
        f"sys.modules.update(dict.fromkeys({modules!r}))\n"  # None: such an import fails
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )

    return run, missing


@pytest.mark.slow_except(1)
def test_every_command_is_one_line(other_system) -> None:
    run, missing = other_system
    for words in command_lines():
        done = run(*words)
        name = "specdec" if words[1] == "specdec" else "specdec-bench"
        assert done.returncode == 2, words
        assert done.stderr.startswith(f"{name}: error: specdec needs Linux: {missing}"), words
        assert done.stderr.count("\n") == 1
        assert not done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("suffix", ["", ".exe", "-script.py"])
def test_installed_scripts_are_one_line(other_system, tmp_path, name, suffix) -> None:
    run, missing = other_system
    script = tmp_path / (name + suffix)
    script.write_text(SCRIPT.format(main=SCRIPTS[name]))
    done = run(str(script), "run", "-m", "model")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: error: specdec needs Linux: {missing}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", ["import specdec", "from specdec import load"])
def test_an_import_fails_with_one_line(other_system, code) -> None:
    """Programs with a command's words among their arguments get it, too."""
    run, missing = other_system
    for words in ([], ["-m", "specdec"], ["specdec"]):
        done = run("-c", code, *words)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"ImportError: specdec needs Linux: {missing}")
        assert "Linux virtual machine" in last


def test_a_program_that_imports_it_is_no_command(other_system, tmp_path) -> None:
    run, _ = other_system
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("import specdec\n")
    (tmp_path / "program" / "__main__.py").write_text("")
    done = run("-m", "program", "-m", "specdec")
    assert done.returncode == 1
    assert "ImportError: specdec needs Linux" in done.stderr
