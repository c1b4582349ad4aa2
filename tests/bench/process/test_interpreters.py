"""Compared programs run on their own interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import fake_peers
import pytest
from tiny_pair import save_model

from bench.commands.app import main
from bench.peers.compare import NOT_RUN, compare
from bench.peers.registry import PEERS, Peer, Weights, why_not
from bench.peers.runs import RunSettings
from bench.process.interpreters import Interpreter, InterpreterError, own_packages, probe
from bench.prompts.workloads import Prompt
from bench.report.tables import tables
from bench.table import text_of
from offload.process.limited import FAILED, OK
from offload.units import GIB

PACKAGE = "only_there"
"""A package in the other environment that ours lacks."""
PROGRAM = f"""
import sys
from bench.peers.program import run_program

def program(task, journal):
    import {PACKAGE}
    journal.loaded({{"executable": sys.executable, "value": {PACKAGE}.VALUE}})
    def decode(prompt, clock):
        clock.reach(1)
        return {{"token_ids": [1]}}
    journal.decode(decode)

sys.exit(run_program(sys.argv[1:], program))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("interpreters") / "target", seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with PACKAGE and nothing else."""
    folder = tmp_path_factory.mktemp("environment") / "its own"
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / PACKAGE).mkdir()
    (packages / PACKAGE / "__init__.py").write_text("VALUE = 7\n")
    metadata = packages / "airllm-4.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: airllm\nVersion: 4.0.0\n")
    return folder / "bin" / "python"


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    fake_peers.install(tmp_path, monkeypatch)
    (tmp_path / "elsewhere.py").write_text(PROGRAM)
    peer = Peer("elsewhere", "elsewhere", ("hf",), "", package=PACKAGE, install="pip install it")
    monkeypatch.setitem(PEERS, peer.name, peer)
    return peer


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_what_an_environment_has(other: Path) -> None:
    actual = probe(str(other), (PACKAGE, "torch"))
    assert actual.path == str(other)  # not its link target: that is another environment
    assert actual.versions == {"python": sys.version.split()[0], "airllm": "4.0.0"}
    assert actual.modules == {PACKAGE}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python looks into the working directory")
def test_a_folder_that_lies_here_is_no_package(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "airllm").mkdir()  # a repository clone, say
    monkeypatch.chdir(tmp_path)
    assert probe(str(other), (PACKAGE, "airllm")).modules == {PACKAGE}


def test_a_name_is_found_on_the_path(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(other.parent) + os.pathsep + os.environ["PATH"])
    assert probe("python", ()).path == str(other)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("#!/bin/sh\necho hello\n", "does not answer as a Python interpreter: exit code 0"),
        ("#!/bin/sh\necho no such lib >&2; exit 127\n", "interpreter: no such lib"),
        ("#!/bin/sh\necho 7\n", "does not answer as a Python interpreter"),
        (
            '#!/bin/sh\necho \'{"version": [3, 8, 1], "versions": {}, "modules": []}\'\n',
            "is Python 3.8.1: 3.10 or later is needed",
        ),
        ("#!/nonexistent/python\n", "does not run"),
    ],
)
def test_what_is_no_interpreter(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(InterpreterError, match=part) as caught:
        probe(program(tmp_path, text), ())
    assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match="there is no such program"):
        probe(str(tmp_path / "nothing"), ())
    with pytest.raises(InterpreterError, match="is a folder: name the interpreter in it"):
        probe(str(tmp_path), ())


def test_what_is_installed_is_asked_there(target: Path, peer: Peer) -> None:
    weights = Weights.of(target)
    assert why_not(peer, weights) == "not installed: pip install it"
    there = Interpreter("/x/python", {}, frozenset({PACKAGE}))
    assert why_not(peer, weights, there) is None
    empty = Interpreter("/x/python", {}, frozenset())
    assert why_not(peer, weights, empty) == "not installed for /x/python: pip install it"


def test_a_program_runs_there_and_the_record_says_so(target: Path, other: Path, peer: Peer) -> None:
    actual = probe(str(other), (PACKAGE,))
    settings = RunSettings(GIB, 4, 10.0, 1, 64, enforce=False, interpreters={peer.name: actual})
    names = [peer.name, "slow"]
    result = compare(names, [Weights.of(target)], [Prompt("a", "x")], settings, [])
    there, here = result["peers"]
    assert (there["exit"], there["reason"]) == (OK, None)
    assert there["settings"] == {"executable": str(other), "value": 7}
    assert here["exit"] == OK
    recorded = result["provenance"]["interpreters"]
    assert recorded == {
        peer.name: {"path": str(other), "versions": actual.versions},
    }
    text = text_of(tables("peers", result))
    assert f"; on {other}: python {actual.versions['python']}, airllm 4.0.0\n" in text


def test_another_interpreter_gets_no_package_of_ours(other: Path, tmp_path: Path) -> None:
    """In an installation pytest lies beside our packages, and must not be found."""
    code = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('bench', 'pytest')])"
    environment = {**os.environ, **own_packages(tmp_path)}
    done = subprocess.run([other, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "[True, False]\n"


@pytest.mark.parametrize("module", ["peers.airllm", "peers.accelerate"])
def test_programs_start_without_any_package(other: Path, tmp_path: Path, module: str) -> None:
    """Only the program's own dependencies may be missing: the journal repeats its words."""
    task = {
        "model": "m", "draft": None, "prompts": [], "n_tokens": 1, "seconds": 1.0,
        "memory_bytes": 1, "n_threads": 1, "n_ctx": 1,
    }  # fmt: skip
    (tmp_path / "task").write_text(json.dumps(task))
    command = [other, "-m", f"bench.{module}", tmp_path / "task", tmp_path / "journal"]
    environment = {**os.environ, **own_packages(tmp_path)}
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    error = json.loads((tmp_path / "journal").read_text())["error"]
    assert error in {f"ModuleNotFoundError: No module named '{n}'" for n in ("airllm", "torch")}


def test_a_journal_ends_without_any_package(other: Path, tmp_path: Path) -> None:
    code = (
        "from offload.process.memory import process_memory; "
        "print(process_memory().peak_rss_bytes > 0)"
    )
    environment = {**os.environ, **own_packages(tmp_path)}
    done = subprocess.run([other, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


# --- the command ------------------------------------------------------------------------------


def test_the_command_takes_an_interpreter(
    capfd: pytest.CaptureFixture[str], target: Path, other: Path, peer: Peer
) -> None:
    argv = f"peers -m {target} --memory-budget 1GiB --no-enforce --peers elsewhere,slow".split()
    argv += "-n 4 --n-prompts 1 -o json --peer-python".split()
    argv.append(f"elsewhere={other}")
    assert main(argv) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert [row["exit"] for row in result["peers"]] == [OK, OK]
    assert result["provenance"]["interpreters"]["elsewhere"]["versions"]["airllm"] == "4.0.0"
    assert main(argv[:-2]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [row["exit"] for row in result["peers"]] == [NOT_RUN, OK]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("elsewhere", "must be NAME=PYTHON"),
        ("elsewhere=", "must be NAME=PYTHON"),
        ("fast=python3", "--peers elsewhere,slow has no 'fast'"),
        ("elsewhere=/none/python", "elsewhere=/none/python: there is no such program"),
        ("slow=python3 --peer-python slow=python3", "names slow twice"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], target: Path, peer: Peer, text: str, part: str
) -> None:
    argv = f"peers -m {target} --memory-budget 1GiB --peers elsewhere,slow --peer-python {text}"
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


# --- programs that rewrite the weights ------------------------------------------------------------


REWRITER = """
import sys, time
from pathlib import Path
from bench.peers.program import run_program

def program(task, journal):
    place = Path(task.options["rewritten"])
    if "FAIL":
        raise OSError("no space left")
    found = sorted(path.name for path in place.iterdir())
    (place / f"made-{len(found)}").write_text("x")
    journal.loaded({"found": found, "place": str(place), "prompts": len(task.prompts)})
    def decode(prompt, clock):
        clock.reach(1)
        return {"token_ids": [1]}
    journal.decode(decode)

sys.exit(run_program(sys.argv[1:], program))
"""


def rewrite(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fail: str
) -> dict[str, Any]:
    fake_peers.install(folder, monkeypatch)
    (folder / "rewriter.py").write_text(REWRITER.replace("FAIL", fail))
    peer = Peer("rewriter", "rewriter", ("hf",), "", rewrites=True)
    monkeypatch.setitem(PEERS, "rewriter", peer)
    settings = RunSettings(GIB, 4, 10.0, 1, 64, enforce=False)
    prompts = [Prompt("a", "x"), Prompt("b", "x")]
    return compare(["rewriter"], [Weights.of(target)], prompts, settings, [])


def test_weights_are_rewritten_once_and_beforehand(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = rewrite(target, tmp_path, monkeypatch, "")
    [row] = result["peers"]
    assert (row["exit"], row["n_prompts"], len(row["processes"])) == (OK, 2, 2)
    # The last of three processes sees the files of the first two.
    assert row["settings"]["found"] == ["made-0", "made-1"]
    assert row["settings"]["prompts"] == 1
    place = Path(row["settings"]["place"])
    assert place.parent == target.parent  # on the measured storage
    assert not place.exists()
    assert row["rewrite_seconds"] > 0
    assert "wrote the weights anew in" in text_of(tables("peers", result))


def test_weights_that_cannot_be_rewritten(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = rewrite(target, tmp_path, monkeypatch, "yes")["peers"]
    assert (row["exit"], row["reason"]) == (FAILED, "OSError: no space left")
    assert (len(row["processes"]), row["rewrite_seconds"]) == (1, None)
    assert not list(target.parent.glob(".rewriter-*"))


def test_weights_where_nothing_can_be_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("rewriter", "rewriter", ("hf",), "", rewrites=True)
    assert why_not(peer, Weights.of(target)) is None
    monkeypatch.setattr("os.access", lambda path, mode: path != target.parent)
    assert why_not(peer, Weights.of(target)) == (
        f"it writes the weights anew, and {target.parent} cannot be written to"
    )
