"""Running servers: `specdec ps`, `specdec stop`, and the log file."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from command_line import expect_error
from serving import COMPLETIONS, SHORT, SMALL, Server, begun

from specdec.cli.app import main
from specdec.cli.commands.servers import _age
from specdec.serve.running.log_file import open_log
from specdec.serve.running.records import OwnRecord, ServerRecord, running_servers

LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without the servers of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specdec" / "servers"


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(["ps", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["servers"]


def test_a_server_is_listed_until_it_ends(
    served_model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(served_model, *SMALL, "--alias", "a,b", "--memory-budget", "1GiB") as server:
        server.ready()
        (item,) = listed(capsys)
        assert item.pop("seconds") < 300
        assert item.pop("started_at") > 1e9
        assert item == {
            "pid": server.process.pid,
            "host": socket.gethostname(),
            "names": ["a", "b"],
            "url": server.url,
            "budget_bytes": 1 << 30,
            "state": "ready",
        }
        assert main(["ps"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["PID", "MODEL", "ADDRESS", "BUDGET", "UP", "STATE"]
        assert row.split()[:5] == [str(server.process.pid), "a,b", server.url, "1.00", "GiB"]
        assert server.post("/v1/budget", {"memory_budget": "900MiB"})[0] == 200
        assert listed(capsys)[0]["budget_bytes"] == 900 << 20
        assert main(["stop", "b"]) == 0
        assert capsys.readouterr().out == f"stopped a ({server.process.pid})\n"
        assert server.process.wait(60) == 0
    assert list(cache.iterdir()) == []
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no server is running\n"


def test_a_killed_server_leaves_nothing_that_is_listed(served_model: Path, cache: Path) -> None:
    with Server(served_model, *SMALL) as server:
        server.ready()
        assert [item.pid for item in running_servers()] == [server.process.pid]
        server.process.kill()
        server.process.wait(60)
        assert len(list(cache.iterdir())) == 1
        assert running_servers() == []
    assert list(cache.iterdir()) == []


def test_a_record_whose_process_number_is_anothers_is_removed(cache: Path) -> None:
    cache.mkdir(parents=True)
    record = ServerRecord(os.getpid(), socket.gethostname(), ("m",), "http://[::1]:1", None, 1.0)
    (cache / "left.json").write_text(json.dumps(asdict(record)))
    (cache / "begins.json").write_text("")
    elsewhere = replace(record, host="another-machine")
    (cache / "elsewhere.json").write_text(json.dumps(asdict(elsewhere)))
    (cache / "foreign.json").write_text('{"names": 1}')
    assert running_servers() == []
    assert {item.name for item in cache.iterdir()} == {
        "begins.json",
        "elsewhere.json",
        "foreign.json",
    }


def test_stop_names_what_it_may_stop(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(capsys, ["stop"], "no server is running")
    assert main(["stop", "--all"]) == 0
    assert capsys.readouterr().out == "no server is running\n"
    own = [OwnRecord(["m", "n"], f"http://127.0.0.1:{port}") for port in (1, 2)]
    entry = f"{os.getpid()} (m)"
    expect_error(capsys, ["stop"], f"2 servers match: give one of {entry}, {entry}, or --all")
    expect_error(capsys, ["stop", "n"], "2 servers match")
    expect_error(capsys, ["stop", "o"], f"no server is called 'o': running are {entry}")
    expect_error(capsys, ["stop", "m", "--all"], "not both")
    assert {item["state"] for item in listed(capsys)} == {"no answer"}
    for item in own:
        item.remove()
    assert running_servers() == []


def test_a_port_of_ones_own_server_is_named_with_how_to_end_it(
    served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = OwnRecord(["m"], f"http://127.0.0.1:{port}")
        argv = ["serve", "-m", str(served_model), "--port", str(port)]
        remedy = f"`specdec stop {os.getpid()}` ends the server m there, or name another"
        expect_error(capsys, argv, "cannot listen", remedy)
        own.remove()


def test_a_second_stop_ends_running_requests(
    served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Server(served_model, "--spec-type", "none", "-c", "32768") as server,
        begun(server.ready(), max_tokens=16000),
    ):
        (record,) = running_servers()
        record.stop()
        server.wait_for("shutting down")
        assert [item["state"] for item in listed(capsys)] == ["draining"]
        assert main(["stop", str(record.pid)]) == 0
        assert server.process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (86400, "1 d 0 h"), (90061, "1 d 1 h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert _age(seconds) == text


def test_requests_and_states_are_in_the_log_file(served_model: Path, tmp_path: Path) -> None:
    path, rotated = tmp_path / "server.log", tmp_path / "server.log.1"
    path.write_text("before\n")
    with Server(served_model, *SMALL, "--log-file", str(path)) as server:
        server.ready().post(COMPLETIONS, SHORT)
        server.get("/nothing")
        server.get("/health")
        path.rename(rotated)
        server.post(COMPLETIONS, SHORT)
        assert server.end() == 0
        assert not any(COMPLETIONS in line for line in server.lines), "only with -v"
    request = rf"{LINE}{COMPLETIONS} 200, \d+\.\d\d s"
    before, loading, ready, page, *requests = rotated.read_text().splitlines()
    assert before == "before"
    for line, start in ((loading, "loading tiny; "), (ready, "ready: tiny"), (page, "chat page: ")):
        assert re.match(LINE + start, line), line
    assert len(requests) == 2
    assert re.fullmatch(request, requests[0])
    assert re.fullmatch(rf"{LINE}other 404, \d+\.\d\d s", requests[1])
    # The signal may come while the last request still ends, which is told in lines of its own.
    after = [line for line in path.read_text().splitlines() if COMPLETIONS in line]
    assert len(after) == 1
    assert re.fullmatch(request, after[0])


def test_a_log_file_whose_folder_is_removed(tmp_path: Path) -> None:
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    write = open_log(folder / "log")
    write("first")
    folder.rename(moved)
    write("second")
    write("third")
    folder.mkdir()
    write("fourth")
    write("fifth")
    (first,) = (moved / "log").read_text().splitlines()
    assert re.fullmatch(LINE + "first", first)
    lines = (folder / "log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["fourth", "fifth"]


def test_a_server_without_its_log_files_folder_ends_at_sigterm(
    served_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = str(folder / "log")
    with Server(served_model, "-c", "32768", "--spec-type", "none", "--log-file", path) as server:
        with begun(server.ready(), max_tokens=16000):
            shutil.rmtree(folder)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("shutting down")  # a line for the log file
        assert server.process.wait(60) == 0


def test_a_log_file_that_cannot_be_written(
    served_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "-m", str(served_model), "--log-file", str(tmp_path / "none" / "log")]
    expect_error(capsys, argv, "cannot write --log-file", "No such file or directory")
