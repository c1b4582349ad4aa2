"""`specdec serve --ray` without Ray: its options, and the relay of an engine's messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from command_line import expect_error
from fake_ray import FakeRay

from specdec import __version__
from specdec.cli.app import main
from specdec.cluster.connection import ClusterError
from specdec.cluster.machines import with_absolute_paths
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import EngineTask, ProcessLost, ProcessRefused, starter
from specdec.serve.process.messages import Beat, MessageSocket, frame
from specdec.serve.process.ray_engine import Machines, RayEngine
from specdec.serve.process.ray_relay import EngineRelay, RemoteTask

# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--ray auto --preset x.toml", "--preset"),
        ("--replicas 2", "--replicas needs --ray"),
        ("--ray auto --replicas 0", "--replicas"),
        ("--ray auto --device cuda", "leave out --device"),
        ("--ray auto --draft-device cuda", "leave out --device and --draft-device"),
        ("--ray auto --enforce --memory-budget 1GiB", "--enforce limits this machine's"),
        ("--ray auto --record-traces traces", "--record-traces takes one writer"),
    ],
)
def test_options_that_do_not_go_together(
    served_model: Path, capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    model = () if "--preset" in argv else ("-m", str(served_model))
    expect_error(capsys, ["serve", *model, *argv.split()], message)


def test_missing_ray_is_reported(
    served_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["serve", "-m", str(served_model), "--ray", "auto"]) == 2
    error = capsys.readouterr().err
    assert error == "specdec: error: --ray needs Ray: pip install 'specdec-stream[ray]'\n"


def test_an_address_where_nobody_answers(
    served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    argv = ["serve", "-m", str(served_model), "--ray", "127.0.0.1:1"]
    expect_error(capsys, argv, "nobody answers at 127.0.0.1:1")


def test_paths_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    load = RunOptions("model", "user/draft", chat_template="plain", prompt_cache_dir="cache")
    load = with_absolute_paths(load)
    assert (load.model, load.draft_model) == (tmp_path / "model", "user/draft")
    assert (load.chat_template, load.prompt_cache_dir) == ("plain", tmp_path / "cache")


# --- the relay --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_ray_options(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "specdec.cluster.machines.Machine.actor_options"
    monkeypatch.setattr(name, lambda *_, **options: {})


ECHO = """
import os, sys
from specdec.serve.process.child import take_marker, take_task
from specdec.serve.process.messages import MessageSocket, ServerGone

socket = MessageSocket(take_marker()[0])
print("specdec: note:", take_task().load.model, file=sys.stderr, flush=True)
try:
    while True:
        message = socket.receive()
        if message == "end":
            os.abort()
        socket.send(message)
except ServerGone:
    sys.exit(3)
"""


def echoing(version: str = __version__) -> RemoteTask:
    """Return the task of a process that sends each message back."""

    def make_start() -> Any:
        return starter([sys.executable, "-c", ECHO], dict(os.environ), subprocess.PIPE)

    engine = EngineTask(RunOptions("m"), ServeOptions())
    return RemoteTask(make_start, engine, version, None, "m")


def started(machines: Machines, task: RemoteTask, said: list[str]) -> tuple[Any, MessageSocket]:
    ours, theirs = socket.socketpair()
    with theirs:
        engine = RayEngine(machines, 1, task, theirs, said.append)
    return engine, MessageSocket(ours.detach())


def test_messages_lines_and_the_exit_code_are_relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    ray: Any = FakeRay("a", "b")
    for last, code in ((None, 3), ("end", -signal.SIGABRT)):
        said: list[str] = []
        engine, ours = started(Machines(ray, 1), echoing(), said)
        for message in ("x", b"y" * 1_000_000, ["z"]):
            # A thread of its own: a server reads while it writes.
            sending = threading.Thread(target=ours.send, args=(message,))
            sending.start()
            while isinstance(received := ours.receive(), Beat):
                pass  # until the process has begun
            sending.join()
            assert received == message
        if last is None:
            ours._socket.shutdown(1)
        else:
            ours.send(last)
        assert engine.wait() == code
        assert "replica 1: its machine is a" in said
        assert "replica 1: note: m" in said
        assert len(ray.killed) == 1
        ray.killed.clear()
        ours.close()


def test_a_machine_with_another_version_cannot_begin() -> None:
    said: list[str] = []
    engine, _ = started(Machines(FakeRay("a"), None), echoing("0.0.1"), said)
    with pytest.raises(ProcessRefused):
        engine.wait()
    assert said[-1].startswith("replica 1: error: on a: this machine has specdec ")
    assert said[-1].endswith("begun by 0.0.1: install the same version")


def test_a_lost_actor_is_a_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = FakeRay("a")

    def lost(self: EngineRelay) -> Any:
        raise RuntimeError("The actor died\nbecause of something")

    monkeypatch.setattr(EngineRelay, "read", lost)
    monkeypatch.setattr(EngineRelay, "start", lambda self, task: None)
    engine, ours = started(Machines(ray, None), echoing(), [])
    with pytest.raises(ProcessLost, match="^The actor died$"):
        engine.wait()
    ours.close()


def test_a_replica_moves_to_a_free_machine_or_waits_for_one() -> None:
    ray = FakeRay("a", "b", "c")
    machines = Machines(ray, 2)
    assert [machines.acquire(number).name for number in machines.replicas] == ["a", "b"]  # type: ignore[union-attr]
    ray.alive = ["a", "c"]
    assert [machines.acquire(number).name for number in (2, 1)] == ["c", "a"]  # type: ignore[union-attr]
    ray.alive = ["c"]
    assert machines.acquire(1) is None
    said: list[str] = []
    engine, ours = started(machines, echoing(), said)
    assert isinstance(ours.receive(), Beat)
    assert said == ["replica 1: its machine is gone, and no other one is free: it waits for one"]
    engine.kill()
    assert engine.wait() == -signal.SIGKILL
    ray.alive = ["c", "b"]
    assert machines.acquire(1).name == "b"  # type: ignore[union-attr]


def test_more_replicas_than_machines() -> None:
    with pytest.raises(ClusterError, match="--replicas is 3, but the Ray cluster has 2 machines"):
        Machines(FakeRay("a", "b"), 3)


def test_frames_need_not_arrive_whole() -> None:
    """The relay passes bytes on, wherever it cuts them."""
    relay = EngineRelay()
    data = frame(["some message"])
    for part in (data[:5], data[5:]):
        relay.write(part)
    assert relay._theirs.recv(1000) == data
    relay.write(b"")
    assert relay._theirs.recv(1000) == b""
    relay._theirs.close()
    relay.write(b"nobody reads it")
