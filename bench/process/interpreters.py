"""Python interpreters of compared programs: ours, or that of an environment of their own.

Compared programs may need package versions that conflict with ours. Their module of this package
(bench.peers.*) then runs on the other interpreter, with its packages and our own sources only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process.provenance import PACKAGES, ROOT
from offload.errors import SpecdecError

_OWN_PACKAGES = ("bench", "specdec", "backends", "offload")
_MIN_VERSION = (3, 10)  # requires-python of pyproject.toml
_PROBE_SECONDS = 60
# Runs on any version of Python, so that an old one is reported.
_PROBE = """
import json, sys
found = {"version": list(sys.version_info[:3]), "versions": {}, "modules": []}
if sys.version_info >= (3, 8):
    import importlib.metadata, importlib.util
    packages, modules = json.loads(sys.argv[1])
    for name in packages:
        try:
            found["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    found["modules"] = [name for name in modules if importlib.util.find_spec(name)]
print(json.dumps(found))
"""


class InterpreterError(SpecdecError):
    """Invalid or unusable interpreter."""


@dataclass(frozen=True)
class Interpreter:
    """Interpreter other than the one that runs us."""

    path: str
    """Absolute path; links are not resolved, as their folder is the environment."""
    versions: dict[str, str]
    """Versions of Python and of the packages that a measurement depends on."""
    modules: frozenset[str]
    """Requested modules that can be imported there."""

    def describe(self) -> dict[str, Any]:
        """Return its description for a record's provenance."""
        return {"path": self.path, "versions": self.versions}


def probe(text: str, modules: tuple[str, ...]) -> Interpreter:
    """Return an interpreter's versions and modules. `text`: a path, or a name on PATH.

    Raises:
        InterpreterError: there is none, or it is too old.
    """
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        raise InterpreterError(f"{text} is a folder: name the interpreter in it, as bin/python")
    program = shutil.which(path)
    if program is None:
        raise InterpreterError(f"{text}: there is no such program")
    answer = _ask(os.path.abspath(program), text, modules)
    version = ".".join(map(str, answer["version"]))
    if tuple(answer["version"]) < _MIN_VERSION:
        minimum = ".".join(map(str, _MIN_VERSION))
        raise InterpreterError(f"{text} is Python {version}: {minimum} or later is needed")
    versions = {"python": version, **answer["versions"]}
    return Interpreter(os.path.abspath(program), versions, frozenset(answer["modules"]))


def has_module(name: str, interpreter: Interpreter | None) -> bool:
    """Return whether a module can be imported; None asks the interpreter that runs us."""
    if interpreter is None:
        return importlib.util.find_spec(name) is not None
    return name in interpreter.modules


def executable(interpreter: Interpreter | None) -> str:
    return sys.executable if interpreter is None else interpreter.path


def own_packages(folder: Path) -> dict[str, str]:
    """Return environment variables with which another interpreter finds our packages.

    They are linked in `folder`, for our site-packages would add packages of our interpreter.
    """
    for name in _OWN_PACKAGES:
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path}


def _ask(path: str, text: str, modules: tuple[str, ...]) -> dict[str, Any]:
    command = [path, "-c", _PROBE, json.dumps([PACKAGES, modules])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            # As the program will run: without packages in the working directory.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InterpreterError(f"{text} does not run: {error}") from None
    try:
        answer = json.loads(done.stdout)
        if done.returncode == 0 and {"version", "versions", "modules"} <= set(answer):
            return dict(answer)
    except (TypeError, ValueError):
        pass
    said = " ".join(done.stderr.strip().splitlines()[-1:]) or f"exit code {done.returncode}"
    raise InterpreterError(f"{text} does not answer as a Python interpreter: {said[:200]}")
