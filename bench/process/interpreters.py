"""Python interpreters that programs run on: ours, or that of an environment of their own.

Programs that are compared may need versions of packages that exclude ours. Their module of this
package (bench.peers.*) then runs on the other interpreter, with that one's packages and, beside
them, our own sources alone.
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
# For any version of Python, so that an old one is named and does not fail.
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
    """What was named as an interpreter is none, or none that can be used."""


@dataclass(frozen=True)
class Interpreter:
    """Another interpreter than the one that runs us."""

    path: str
    """Absolute; a link is kept, as what it lies in is the environment."""
    versions: dict[str, str]
    """Of Python and of the packages that a measurement depends on."""
    modules: frozenset[str]
    """Of those asked for, what can be imported there."""

    def describe(self) -> dict[str, Any]:
        """For a record's provenance."""
        return {"path": self.path, "versions": self.versions}


def probe(text: str, modules: tuple[str, ...]) -> Interpreter:
    """Ask an interpreter what it has. `text`: a path, or a name to be found on PATH.

    Raises:
        InterpreterError: there is none, or it is too old.
    """
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        raise InterpreterError(f"{text} is a folder: name the interpreter in it, as bin/python")
    result = shutil.which(path)
    if result is None:
        raise InterpreterError(f"{text}: there is no such program")
    answer = _ask(os.path.abspath(result), text, modules)
    version = ".".join(map(str, answer["version"]))
    if tuple(answer["version"]) < _MIN_VERSION:
        minimum = ".".join(map(str, _MIN_VERSION))
        raise InterpreterError(f"{text} is Python {version}: {minimum} or later is needed")
    versions = {"python": version, **answer["versions"]}
    return Interpreter(os.path.abspath(result), versions, frozenset(answer["modules"]))


def has_module(name: str, interpreter: Interpreter | None) -> bool:
    """Whether a module can be imported; None asks the interpreter that runs us."""
    if interpreter is None:
        return importlib.util.find_spec(name) is not None
    return name in interpreter.modules


def executable(interpreter: Interpreter | None) -> str:
    return sys.executable if interpreter is None else interpreter.path


def own_packages(folder: Path) -> dict[str, str]:
    """Environment with which another interpreter finds our packages, linked in `folder`.

    Only those: where we are installed, what lies beside us are the packages of our interpreter.
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
            # As the program will run: what lies in the working directory is not installed.
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
