"""Checks of what a release uploads: `make release-check`.

Builds sdist and wheel, checks their metadata, and installs each in an environment of its own beside
frappe-bench, another distribution with a package `bench`. `import specdec` and one run have to work
there in either order of installation, and `specdec-bench` works or says what is in the way.
"""

from __future__ import annotations

import email
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "release"
NEIGHBOUR = "frappe-bench"
RUN = ("run", "--raw", "-m", "pair:target", "-md", "pair:draft", "-p", "def area(r):", "-n", "8")
SDIST_FILES = ("SECURITY.md", "LICENSE", "README.md", "constraints.txt", "hatch_build.py")


class ReleaseError(Exception):
    """Something that a release must not have."""


def main() -> int:
    """Run all checks; print each step, and a line about the first that fails."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        say("building sdist and wheel")
        run(sys.executable, "-m", "build", "--outdir", str(FOLDER), str(ROOT))
        (sdist,), (wheel,) = FOLDER.glob("*.tar.gz"), FOLDER.glob("*.whl")
        say("checking the metadata")
        run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
        for problem in problems(sdist, wheel):
            raise ReleaseError(problem)
        check_installed(wheel, is_first=True)
        check_installed(sdist, is_first=False)
    except ReleaseError as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    say(f"fit for an upload: {sdist.name}, {wheel.name}")
    return 0


def problems(sdist: Path, wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the metadata, one line each."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"the sdist lacks {name}" for name in SDIST_FILES if name not in names)
    metadata = wheel_metadata(wheel)
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL") or ())
    if "Security" not in urls:
        yield "the project has no URL: set SPECDEC_PROJECT_URL, or the git remote `origin`"
    links = str(metadata.get_payload()).split("](")[1:]
    relative = [link.split(")")[0] for link in links if not link.startswith(("https://", "#"))]
    if relative:
        yield f"links of the README lead nowhere on PyPI: {', '.join(relative)}"
    extras = metadata.get_all("Requires-Dist") or ()
    if any("pytest" in line and "dev" not in line for line in extras):
        yield "an extra of users takes test tools"


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def check_installed(distribution: Path, *, is_first: bool) -> None:
    """Install a distribution and its neighbour, ours first or last, and run it."""
    say(f"installing {distribution.name} {'before' if is_first else 'after'} {NEIGHBOUR}")
    venv = FOLDER / ("venv-first" if is_first else "venv-last")
    run(sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    options = ["-c", str(ROOT / "constraints.txt"), *shlex.split(os.environ.get("RELEASE_PIP", ""))]
    steps = [[*options, str(distribution)], ["--no-deps", NEIGHBOUR]]
    for words in steps if is_first else reversed(steps):
        run(python, "-m", "pip", "install", "--quiet", *words)
    run(python, "-I", "-c", "import specdec; specdec.load, specdec.LLM, specdec.SamplingParams")
    say("running it")
    command = str(venv / "bin" / "specdec")
    if not run(command, *RUN).strip():
        raise ReleaseError(f"{distribution.name} printed no text")
    check_bench(str(venv / "bin" / "specdec-bench"), is_overwritten=is_first)
    shutil.rmtree(venv)


def check_bench(command: str, *, is_overwritten: bool) -> None:
    done = subprocess.run(
        [command, "--help"], capture_output=True, text=True, cwd=FOLDER, env=environment()
    )
    if not is_overwritten:
        if done.returncode:
            raise ReleaseError(f"specdec-bench failed: {done.stderr}")
    elif done.returncode != 2 or done.stderr.count("\n") != 1 or "`bench`" not in done.stderr:
        raise ReleaseError(f"specdec-bench is silent about another `bench`: {done.stderr}")


def run(*words: str) -> str:
    """Run a command outside of the checkout; return its output. Raises ReleaseError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(words, capture_output=True, text=True, cwd=FOLDER, env=environment())
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{shlex.join(words)} failed with {done.returncode}:\n{last}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment of commands, which must not find this checkout."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def say(line: str) -> None:
    print(f"release-check: {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
