"""The command line in a subprocess: signals, pipes, memory limits."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import Models, save_models, start, start_interpreter, wait_for_output
from tiny_pair import save_model

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.units import MIB
from specdec.cli.app import main

LONG = ("-p", "a", "-n", "30000", "--seed", "1", "--temperature", "2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


def test_ctrl_c_in_the_middle_of_a_generation(models: Models) -> None:
    process = start(models.run_argv(*LONG))
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"specdec: interrupted\n"


def test_ctrl_c_in_the_middle_of_a_streamed_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain decoding spends all its time in passes; readers that were not stopped and joined would
    keep the process alive."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    target = save_model(tmp_path / "target", seed=2, **sizes)  # 50 MB
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    argv = ["-m", str(target), "--threads", "1", "-c", "4096", "--spec-type", "none"]
    assert main(["plan", *argv, "--json"]) == 0
    # Memory for at most a few layers besides the ring: the others stream.
    budget = json.loads(capsys.readouterr().out)["smallest_budget_bytes"] + 16 * MIB
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    process = start_interpreter(["run", *argv, "--memory-budget", f"{budget}B", *LONG])
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"specdec: interrupted\n"
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_reader_that_goes_away(models: Models) -> None:
    process = start_interpreter(models.run_argv(*LONG))
    wait_for_output(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err == b""


def require_cgroup() -> None:
    try:
        with MemoryCgroup.create(2**30):
            pass
    except CgroupUnavailable as error:
        pytest.skip(str(error))


def test_enforced_run(models: Models) -> None:
    require_cgroup()
    argv = models.run_argv("-p", "a", "-n", "4", "--json", "--memory-budget", "1.1GB", "--enforce")
    out, err = start(argv).communicate(timeout=240)
    # Not a whole number of pages: the kernel rounds the limit down, and the run uses the limit.
    assert 1_100_000_000 - 4096 < json.loads(out)["stats"]["memory_budget_bytes"] <= 1.1e9, err
    assert err == b""


@pytest.mark.slow
def test_sigterm_leaves_no_child_behind(models: Models) -> None:
    require_cgroup()
    process = start(models.run_argv(*LONG, "--memory-budget", "1GiB", "--enforce"))
    wait_for_output(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)  # the child's end closes the pipes
    assert process.returncode == 143
    assert err == b""


@pytest.mark.slow
def test_ctrl_c_in_an_enforced_run(models: Models) -> None:
    require_cgroup()
    process = start(models.run_argv(*LONG, "--memory-budget", "1GiB", "--enforce"))
    wait_for_output(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"specdec: interrupted\n"
