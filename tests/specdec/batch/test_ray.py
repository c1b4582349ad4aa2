"""A batch on a local Ray of two workers: the same file, also when workers are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from command_line import expect_error, start
from crashed_batches import LOG_BYTES, partial_bytes
from tiny_pair import save_model

from specdec.batch.lines import Line
from specdec.batch.ray_worker import Ended, Failed, Reported, Requested, Worker
from specdec.batch.request import Rules
from specdec.cli.app import main
from specdec.cluster.connection import running_cluster
from specdec.run_options import RunOptions

VERSION = __import__("specdec").__version__
RULES = Rules("m", {"max_tokens": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


# --- one worker, without Ray ----------------------------------------------------------------------


def test_a_worker_asks_for_lines_and_says_answers(model: Path) -> None:
    worker = Worker(RunOptions(model, ctx_size=64, threads=1), RULES, VERSION)
    for _ in range(2):  # once more with the same models
        lines = [Line(number, 7, b'{"prompt": "abc"}', 17) for number in (1, 2, 3)]
        said, actual = worker.start(), []
        while said != Ended():
            if said == Requested():
                said = worker.give(lines.pop(0) if lines else None)
            else:
                assert isinstance(said, Reported)
                actual.append(said.answer.key.number)
                n_tokens = said.stats.generated_tokens
                said = worker.go_on()
        assert sorted(actual) == [1, 2, 3]
        assert n_tokens >= 3
    worker._llm.close()  # type: ignore[union-attr]


def test_a_worker_that_cannot_answer_says_why(model: Path) -> None:
    little = RunOptions(model, memory_budget="70MiB")
    assert "70" in Worker(little, RULES, VERSION).start().message  # type: ignore[attr-defined]
    other = Worker(RunOptions(model), RULES, "0.0.1").start()
    assert isinstance(other, Failed)
    assert "was begun by 0.0.1: install the same version" in other.message
    other = Worker(RunOptions(model), replace(RULES, weights="0123"), VERSION).start()
    assert isinstance(other, Failed)
    assert "the command was begun with 0123: copy the model here" in other.message


# --- options ----------------------------------------------------------------------------------


def test_missing_ray_is_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    out = str(tmp_path / "out.jsonl")
    assert main(["batch", str(source), "-m", str(model), "-o", out, "--ray", "auto"]) == 2
    error = capsys.readouterr().err
    assert error == "specdec: error: --ray needs Ray: pip install 'specdec-stream[ray]'\n"
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("address", ["foo", "ray://a:1", "a:b", ":5", "127.0.0.1:1", "x:99999"])
def test_an_address_where_nobody_answers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    pytest.importorskip("ray")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    out = str(tmp_path / "out.jsonl")
    expect_error(
        capsys, ["batch", str(source), "-m", str(model), "-o", out, "--ray", address], address
    )


def test_a_cluster_that_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's note of the address stays after the cluster was killed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert running_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_cluster() == address
    assert running_cluster() is None
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    assert running_cluster() is None


# --- a cluster --------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # Ray would leave one in ~/.ray
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for index in range(60):
            line = {"prompt": f"prompt {index}", "max_tokens": 20 + index % 40, "temperature": 1.0}
            file.write(json.dumps(line) + "\n" if index % 30 != 7 else "{\n")
    return path


def argv(source: Path, model: Path, out: str, *more: str) -> list[str]:
    common = ["-m", str(model), "--threads", "1", "-c", "128", "--memory-budget", "1GiB"]
    return ["batch", str(source), "-o", str(source.with_name(out)), *common, *more]


@contextmanager
def on_ray(source: Path, model: Path, out: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `specdec batch` on two workers, and end everything that it started."""
    process = start(argv(source, model, out, "--ray", "auto", "--workers", "2"))
    try:
        yield process
    finally:
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for item in started:
                item.kill()


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    actual = []
    for item in psutil.Process(process.pid).children(recursive=True):
        try:
            if " ".join(item.cmdline()).startswith("ray::Worker"):
                actual.append(item.pid)
        except psutil.NoSuchProcess:
            continue
    return actual


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)  # Ray and several processes that import torch
def test_a_worker_that_is_killed_loses_nothing(source: Path, model: Path) -> None:
    _, err = start(argv(source, model, "alone.jsonl")).communicate(timeout=200)
    expected = source.with_name("alone.jsonl").read_bytes()
    partial = source.with_name("out.jsonl.partial")
    with on_ray(source, model, "out.jsonl") as process:
        while partial_bytes(source.with_name("out.jsonl")) < 10 * LOG_BYTES:
            assert process.poll() is None, process.communicate()[1].decode()
            time.sleep(0.02)
        killed = workers_of(process)[0]
        os.kill(killed, signal.SIGKILL)
        out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err.decode()
    assert out == b""
    first, *rest = err.decode().splitlines()
    assert first.startswith("specdec: note: a worker on ")
    assert first.endswith("lines are given out again")
    assert len(rest) == 2  # lines with errors, results
    assert source.with_name("out.jsonl").read_bytes() == expected
    assert not partial.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_end_again_and_again_end_the_batch(source: Path, model: Path) -> None:
    with on_ray(source, model, "out.jsonl") as process:
        while process.poll() is None:
            for worker in workers_of(process):
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err.decode()
    assert out == b""
    last = err.decode().splitlines()[-1]
    assert last.startswith("specdec: error: a worker on ")
    assert "3 times without an answer between them, and no other is left" in last
