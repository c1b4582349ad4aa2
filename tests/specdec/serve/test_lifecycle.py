"""Starting, queueing, clients that go away, draining, ending."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from command_line import expect_error
from serving import ROOT, Server, events

from bench.serve.disconnects import disconnect
from bench.serve.server import ServerUnderTest

LONG = {"prompt": "x", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}
COMPLETIONS = "/v1/completions"


SMALL = ("--spec-type", "none", "-c", "512", "--max-queue", "3", "--drain-timeout", "30")
"""Room for three requests, and texts that take a while."""
IMPATIENT = ("--write-timeout", "1", "--max-choices", "200", "--max-logprobs", "10000000")


@pytest.fixture(scope="module")
def small(served_model: Path) -> Iterator[Server]:
    """For the tests that leave it running."""
    with Server(served_model, *SMALL, *IMPATIENT) as started:
        yield started.ready()


@pytest.fixture
def mortal(served_model: Path) -> Iterator[Server]:
    with Server(served_model, *SMALL) as started:
        yield started.ready()


def begun(server: Server, **more: Any) -> socket.socket:
    """A stream whose first text has come."""
    raw = server.post_raw(COMPLETIONS, {**LONG, "stream": True, **more})
    raw.settimeout(60)
    answer = b""
    while b'"text"' not in answer:
        answer += raw.recv(65536)
    return raw


def test_the_state_is_told_from_the_start(served_model: Path) -> None:
    with Server(served_model) as server:
        status, text = server.get("/health")
        if status == 503:  # it may have been quick
            assert text == '{"status":"starting"}'
            assert server.post(COMPLETIONS, SHORT)[0] == 503
        server.ready()
        assert server.get("/health") == (200, '{"status":"ready"}')
        assert server.end() == 0
        told = "".join(server.lines)
        assert str(served_model) not in told
        assert told.count("\n") == 2, told


def test_a_model_without_a_template_is_told_of(tmp_path: Path) -> None:
    from tiny_pair import save_model

    with Server(save_model(tmp_path / "bare", seed=0), "--alias", "mine") as server:
        server.ready()
        server.wait_for("note: the model has no chat template")
        talk = [{"role": "user", "content": "hi"}]
        status, answer = server.post("/v1/chat/completions", {"messages": talk, "max_tokens": 2})
        assert (status, answer["model"]) == (200, "mine")
        assert answer["usage"]["prompt_tokens"] == len("User: hi\nAssistant:")
        tool = {"type": "function", "function": {"name": "f"}}
        status, answer = server.post("/v1/chat/completions", {"messages": talk, "tools": [tool]})
        assert status == 400
        assert "no chat template" in answer["error"]["message"]


def test_a_client_that_goes_away_ends_its_text(small: Server) -> None:
    before = small.metric("specdec_generated_tokens_total")
    begun(small).close()
    small.wait_until_free()
    assert 1 <= small.metric("specdec_generated_tokens_total") - before < 480
    raw = small.post_raw(COMPLETIONS, LONG)  # not streamed
    while not small.metric("specdec_requests_inside"):
        time.sleep(0.01)
    raw.close()
    small.wait_until_free()
    assert small.metric("specdec_generated_tokens_total") - before < 2 * 480
    assert small.post(COMPLETIONS, SHORT)[0] == 200


def test_many_clients_that_go_away_leave_nothing(small: Server) -> None:
    """A thousand of them: python -m bench.serve.disconnects"""
    assert disconnect(ServerUnderTest(small.url, small.process.pid), n_clients=30) == []


def test_a_full_queue_says_so(small: Server) -> None:
    raws = [begun(small), *(small.post_raw(COMPLETIONS, SHORT) for _ in range(2))]
    while small.metric("specdec_requests_inside") < 3:
        time.sleep(0.01)
    status, answer = small.post(COMPLETIONS, SHORT)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    raws[0].close()
    for raw in raws[1:]:  # those that waited are answered
        raw.settimeout(60)
        assert b" 200 " in raw.recv(65536).split(b"\r\n")[0]
        raw.close()
    assert small.get("/health")[0] == 200


def test_connections_beyond_the_limit_are_told(served_model: Path) -> None:
    """In the shape of all errors; those that came before are served."""
    more = ("--max-connections", "2", "--read-timeout", "120")
    with Server(served_model, *more) as server:
        at = ("127.0.0.1", server.ready().port)
        with socket.create_connection(at) as first, socket.create_connection(at):
            status, text = server.get("/v1/models")
            error = json.loads(text)["error"]
            assert (status, error["type"]) == (503, "service_unavailable_error")
            first.settimeout(60)
            first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in first.recv(4096)


def test_connections_that_cannot_even_be_told_are_closed(served_model: Path) -> None:
    """They ask for nothing, and would take all files that the process may open."""
    more = ("--max-connections", "2", "--read-timeout", "120")
    with Server(served_model, *more) as server, ExitStack() as stack:
        at = ("127.0.0.1", server.ready().port)
        *_, last = (stack.enter_context(socket.create_connection(at, 60)) for _ in range(5))
        assert last.recv(1) == b""


def test_a_hundred_at_once_before_a_queue_of_32(served_model: Path) -> None:
    """Nobody is left without an answer, and who was let in has the text that it has alone."""
    more = ("--spec-type", "none", "-c", "256", "--kv-tokens", "4096", "--max-queue", "32")
    body, prompts = {**LONG, "max_tokens": 200}, [f"{i} is " for i in range(100)]
    with Server(served_model, *more) as server, ExitStack() as stack:
        server.ready()
        raws = [
            stack.enter_context(server.post_raw(COMPLETIONS, {**body, "prompt": one}))
            for one in prompts
        ]
        told = [answer_of(raw) for raw in raws]
        let_in = [i for i, (status, _) in enumerate(told) if status == 200]
        assert {status for status, _ in told} == {200, 429}
        assert len(let_in) >= 32
        for first in range(0, len(let_in), 8):
            some = let_in[first : first + 8]
            _, alone = server.post(COMPLETIONS, {**body, "prompt": [prompts[i] for i in some]})
            texts = [choice["text"] for choice in alone["choices"]]
            assert [told[i][1]["choices"][0]["text"] for i in some] == texts
        assert server.metric("specdec_requests_inside") == 0


def answer_of(raw: socket.socket) -> tuple[int, Any]:
    raw.settimeout(120)
    response = HTTPResponse(raw)
    response.begin()
    return response.status, json.loads(response.read())


def test_many_at_once_are_not_mixed_up(server: Server) -> None:
    prompts = [f"number {i}: " for i in range(12)]
    body = {"max_tokens": 10, "temperature": 0}
    alone = [server.post(COMPLETIONS, {**body, "prompt": one})[1] for one in prompts]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = server.post(COMPLETIONS, {**body, "prompt": prompts[i]})[1]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, answer in enumerate(alone):
        assert found[i]["choices"] == answer["choices"]


def test_a_request_has_its_time(served_model: Path) -> None:
    more = ("--spec-type", "none", "-c", "32768", "--request-timeout", "0.4")
    with Server(served_model, *more) as server:
        server.ready()
        long = {**LONG, "max_tokens": 16000}
        status, answer = server.post(COMPLETIONS, long)
        assert (status, answer["error"]["type"]) == (408, "timeout_error")
        with server.post_raw(COMPLETIONS, long) as raw:
            raw.settimeout(60)
            assert b"x-should-retry: false" in raw.recv(65536).lower()  # by OpenAI's clients
        with server.post_raw(COMPLETIONS, {**long, "stream": True}) as raw:
            raw.settimeout(60)
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += raw.recv(65536)
        told = events(text.decode().replace("\r\n", "\n"))
        assert told[-1]["error"]["type"] == "timeout_error"
        server.wait_until_free()


def test_a_client_that_reads_nothing_is_cut(small: Server) -> None:
    """Its text ends, and whoever waits behind it is served."""
    before = small.metric("specdec_generated_tokens_total")
    # A greedy text is computed once and sent `n` times: few tokens fill all that the kernel holds.
    with small.post_raw(COMPLETIONS, {**LONG, "stream": True, "logprobs": 20, "n": 200}):
        end = time.monotonic() + 60
        while not small.metric("specdec_requests_inside"):
            assert time.monotonic() < end, "it was not let in"
            time.sleep(0.01)
        small.wait_until_free(240)
    assert small.metric("specdec_generated_tokens_total") - before < 480
    assert small.post(COMPLETIONS, SHORT)[0] == 200


def test_clients_that_do_not_take_the_end_of_an_answer_are_cut(small: Server) -> None:
    """It was in the server's hands, too short to be waited for: the connection stayed for ever."""
    files = Path(f"/proc/{small.process.pid}/fd")
    before = len(list(files.iterdir()))
    with ExitStack() as stack:
        for n_answers in range(2, 242, 3):  # what the kernel holds of them is unknown
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", small.port))
            raw.sendall(b"GET /page/script.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * n_answers)
        end = time.monotonic() + 120
        while len(list(files.iterdir())) > before:
            assert time.monotonic() < end, "a connection is still open"
            time.sleep(0.2)


def test_sigterm_ends_an_idle_server_at_once(mortal: Server) -> None:
    begin = time.monotonic()
    assert mortal.end() == 0
    assert time.monotonic() - begin < 15


def test_sigterm_lets_a_text_end_and_no_other_begin(mortal: Server) -> None:
    with begun(mortal) as raw:
        mortal.process.send_signal(signal.SIGTERM)
        while mortal.get("/health")[1] != '{"status":"draining"}':
            time.sleep(0.02)
        assert mortal.post(COMPLETIONS, SHORT)[0] == 503
        text = b""
        while piece := raw.recv(65536):
            text += piece
        assert b'"finish_reason":"length"' in text
        assert b"[DONE]" in text
    assert mortal.process.wait(30) == 0


def test_a_text_that_takes_too_long_is_ended(served_model: Path) -> None:
    more = ("--spec-type", "none", "-c", "32768", "--drain-timeout", "0.5")
    with Server(served_model, *more) as server:
        with begun(server.ready(), max_tokens=16000) as raw:
            assert server.end() == 0
            text = b""
            while piece := raw.recv(65536):
                text += piece
        assert b"shutting down" in text


def test_a_second_signal_does_not_wait(served_model: Path) -> None:
    with (
        Server(served_model, "--spec-type", "none", "-c", "32768") as server,
        begun(server.ready(), max_tokens=16000),
    ):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("ending")
        assert server.end() == 128 + signal.SIGTERM


def test_it_ends_when_nobody_reads_its_log_any_more(served_model: Path) -> None:
    """As in `specdec serve 2>&1 | tee log`, of which Ctrl-C ends tee, too: it drained for ever."""
    argv = [sys.executable, "-m", "specdec", "serve", "-m", str(served_model), "--port", "0"]
    with subprocess.Popen([*argv, *SMALL], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if "ready: " in line)
            process.stderr.close()
            at = ("127.0.0.1", int(ready.rpartition(":")[2].removesuffix("/v1\n")))
            body = json.dumps({**LONG, "stream": True})
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection(at) as raw:
                raw.settimeout(60)
                raw.sendall((head + body).encode())
                assert b" 200 " in raw.recv(65536)
                process.send_signal(signal.SIGTERM)
                assert b"[DONE]" in b"".join(iter(lambda: raw.recv(65536), b""))
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_ctrl_c_is_130(mortal: Server) -> None:
    assert mortal.end(signal.SIGINT) == 130


# --- mistakes ----------------------------------------------------------------------------------


def test_a_port_that_is_taken(served_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["serve", "-m", str(served_model), "--port", str(taken.getsockname()[1])]
        expect_error(capsys, argv, "cannot listen at 127.0.0.1", "--port")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com"])
def test_others_need_a_key(
    host: str, served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "-m", str(served_model), "--host", host]
    expect_error(capsys, argv, "SPECDEC_API_KEY")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--api-key-file", "/nowhere/key"], "cannot read api_key_file"),
        (["--api-key-file", os.devnull], "printable"),
        (["--api-key", "a\nb"], "printable"),
        (["--api-key", "a", "--api-key-file", os.devnull], "not both"),
        (["--max-body", "lots"], "max_body"),
        (["--max-queue", "0"], "--max-queue"),
        (["--port", "70000"], "port"),
        (["--write-timeout", "0"], "write_timeout"),
    ],
)
def test_options_that_make_no_sense(
    argv: list[str], named: str, served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_error(capsys, ["serve", "-m", str(served_model), *argv], named)


def test_a_model_that_cannot_be_loaded(served_model: Path) -> None:
    with Server(served_model, "--memory-budget", "64MiB") as server:
        code = server.process.wait(120)
        assert code == 2, server.lines
        assert "budget" in server.lines[-1], server.lines


def test_without_its_libraries_the_extra_is_named(served_model: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from specdec.cli.app import main\n"
        f"sys.exit(main(['serve', '-m', {str(served_model)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "pip install 'specdec[serve]'" in done.stderr
