"""The engine's process ends or hangs: the server goes on, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import children, engine_of, is_alive, wait_until_gone
from serving import COMPLETIONS, LONG, SHORT, OwnServer, Server, begun, events

N_STREAMS = 4
OPTIONS = ("--spec-type", "none", "-c", "32768", "--engine-timeout", "4")
ENDLESS = {"max_tokens": 16000}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def server(served_model: Path, temporary: Path) -> Iterator[Server]:
    """A server that survives, with its temporary files in a folder of their own."""
    environment = {"TMPDIR": str(temporary)}
    with Server(served_model, *OPTIONS, environment=environment) as started:
        yield started.ready()


def rest(raw: Any) -> list[Any]:
    """Return the last events of a stream."""
    text = b""
    with raw:
        while part := raw.recv(65536):
            text += part
            if b"[DONE]" in part:
                break
    lines = text.decode().replace("\r\n", "\n")
    whole = lines[lines.index("data: ") :]
    return list(events("\n".join(line for line in whole.splitlines() if line.startswith("data:"))))


def wait_until_ready(server: Server, seconds: float = 60) -> set[str]:
    """Return the states until the next one is ready."""
    end, states = time.monotonic() + seconds, set[str]()
    while True:
        status, text = server.get("/health")
        if status == 200 and states:
            return states
        states.add(text)
        assert time.monotonic() < end, states
        time.sleep(0.01)


def left(server: Server, temporary: Path) -> dict[str, int]:
    return {
        "children": len(children(server.process.pid)),
        "files": len(list(temporary.iterdir())),
        "shared memory": len(os.listdir("/dev/shm")),
        "open files": len(os.listdir(f"/proc/{server.process.pid}/fd")),
    }


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_streams_of_an_engine_that_ends_get_an_error(
    server: Server, temporary: Path, number: int
) -> None:
    before = left(server, temporary)
    for _ in range(3):
        with ThreadPoolExecutor(N_STREAMS) as pool:
            streams = list(pool.map(lambda _: begun(server, **ENDLESS), range(N_STREAMS)))
        engine = engine_of(server)
        os.kill(engine, number)
        for last in map(rest, streams):
            assert last[-1]["error"]["code"] == "engine_lost"
        states = wait_until_ready(server) if server.get("/health")[0] != 200 else {"again"}
        assert states <= {'{"status":"restarting"}', '{"status":"ready"}', "again"}
        assert not is_alive(engine)
        assert server.post(COMPLETIONS, SHORT)[0] == 200
        assert engine_of(server) != engine
    server.wait_until_free()
    after = left(server, temporary)
    assert after["open files"] <= before["open files"] + N_STREAMS, "connections may be kept alive"
    assert {**after, "open files": 0} == {**before, "open files": 0}
    assert server.metric("specdec_engine_restarts_total") >= 3


def test_the_plan_has_the_memory_of_both(server: Server) -> None:
    memory = json.loads(server.get("/v1/plan")[1])["memory"]
    assert memory["server process"] > 0
    pages = int(Path(f"/proc/{engine_of(server)}/statm").read_text().split()[1])
    assert server.metric("specdec_resident_bytes") > pages * os.sysconf("SC_PAGE_SIZE")


def test_whole_answers_and_requests_meanwhile_get_a_503(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, COMPLETIONS, {**LONG, **ENDLESS})
        while not server.metric("specdec_requests_inside"):
            time.sleep(0.01)
        os.kill(engine_of(server), signal.SIGKILL)
        status, answer = asked.result(60)
    assert (status, answer["error"]["code"]) == (503, "engine_lost")
    assert server.get("/v1/models")[0] == 200, "the same model is loaded again"
    wait_until_ready(server)


def test_an_engine_that_hangs_is_started_again(server: Server) -> None:
    engine = engine_of(server)
    stream = begun(server, **ENDLESS)
    os.kill(engine, signal.SIGSTOP)
    assert rest(stream)[-1]["error"]["code"] == "engine_lost"
    server.wait_for("gave no sign of life for 4 s and was killed; it is started again")
    wait_until_gone(engine)
    end = time.monotonic() + 60
    while server.post(COMPLETIONS, SHORT)[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_ends_with_the_server(served_model: Path, number: int) -> None:
    with Server(served_model, *OPTIONS, "--drain-timeout", "0.5") as server:
        begun(server.ready(), **ENDLESS)
        engine = engine_of(server)
        code = server.end(number)
        wait_until_gone(engine, 2)
        assert code == {signal.SIGTERM: 0, signal.SIGINT: 130}.get(number, -number)


@pytest.mark.slow
def test_an_interpreter_of_its_own(served_model: Path) -> None:
    """The other tests fork the engine from the server; here both start as a user's do."""
    with OwnServer(served_model, *OPTIONS) as server:
        stream = begun(server.ready(), **ENDLESS)
        for _ in range(2):
            engine = engine_of(server)
            rss = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
            assert rss * os.sysconf("SC_PAGE_SIZE") < 128 << 20, "torch is in the engine only"
            os.kill(engine, signal.SIGABRT)
            assert rest(stream)[-1]["error"]["code"] == "engine_lost"
            wait_until_ready(server)
            stream = begun(server, **ENDLESS)
        stream.close()
        engine = engine_of(server)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until_gone(engine, 5)
