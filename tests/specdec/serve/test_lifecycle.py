"""Starting, draining, ending, and refusals at the start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import expect_error
from serving import COMPLETIONS, LONG, ROOT, SHORT, SMALL, OwnServer, Server, begun

from specdec.pair import pair_path

FAILED = "the model failed; the server's log says why"


@pytest.fixture
def mortal(served_model: Path) -> Iterator[Server]:
    with Server(served_model, *SMALL) as started:
        yield started.ready()


def test_the_state_is_reported_from_the_start(served_model: Path) -> None:
    with Server(served_model) as server:
        status, text = server.get("/health")
        if status == 503:  # it may have been quick
            assert text == '{"status":"starting"}'
            assert server.post(COMPLETIONS, SHORT)[0] == 503
        server.ready()
        assert server.get("/health") == (200, '{"status":"ready"}')
        assert server.end() == 0
        log = "".join(server.lines)
        assert str(served_model) not in log
        assert log.count("\n") == 3, log


def test_a_truncated_model_file_is_an_engine_error_and_not_one_requests(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair_path("pair:moe"), tmp_path / "moe"))
    with Server(folder, "--spec-type", "none", "-c", "256", "--memory-budget", "2GiB") as server:
        server.ready()
        assert server.post(COMPLETIONS, {**SHORT, "max_tokens": 0})[0] == 400
        assert server.get("/health")[0] == 200
        os.truncate(folder / "model.safetensors", 4096)
        status, answer = server.post(COMPLETIONS, SHORT)
        assert (status, answer["error"]["message"]) == (500, FAILED)
        server.wait_for("error: .*model.safetensors")
        assert server.get("/health") == (503, '{"status":"failing"}')
        assert server.post(COMPLETIONS, SHORT)[0] == 500, "let in all the same"
        assert server.end() == 0


def test_a_model_without_a_template_is_reported(tmp_path: Path) -> None:
    from tiny_pair import save_model

    with Server(save_model(tmp_path / "bare", seed=0), "--alias", "mine") as server:
        server.ready()
        server.wait_for("note: the model has no chat template")
        talk = [{"role": "user", "content": "hi"}]
        status, answer = server.post("/v1/chat/completions", {"messages": talk, "max_tokens": 2})
        assert (status, answer["model"]) == (200, "mine")
        assert answer["usage"]["prompt_tokens"] == len("User: hi\nAssistant:")
        tool = {"type": "function", "function": {"name": "f"}}
        body = {"messages": talk, "tools": [tool], "max_tokens": 2}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200
        assert answer["usage"]["prompt_tokens"] > len("User: hi\nAssistant:"), "they are told"


def test_sigterm_ends_an_idle_server_at_once(mortal: Server) -> None:
    begin = time.monotonic()
    assert mortal.end() == 0
    assert time.monotonic() - begin < 15


@pytest.mark.slow
def test_sigterm_lets_a_sequence_end_and_no_other_begin(served_model: Path) -> None:
    with OwnServer(served_model, *SMALL) as mortal, begun(mortal.ready()) as raw:
        mortal.process.send_signal(signal.SIGTERM)
        while mortal.get("/health")[1] != '{"status":"draining"}':
            time.sleep(0.02)
        assert mortal.post(COMPLETIONS, SHORT)[0] == 503
        text = b""
        while read_chunk := raw.recv(65536):
            text += read_chunk
        assert b'"finish_reason":"length"' in text
        assert b"[DONE]" in text
        assert mortal.process.wait(30) == 0


def test_a_sequence_that_takes_too_long_is_ended(served_model: Path) -> None:
    more = ("--spec-type", "none", "-c", "32768", "--drain-timeout", "0.5")
    with Server(served_model, *more) as server:
        with begun(server.ready(), max_tokens=16000) as raw:
            assert server.end() == 0
            text = b""
            while read_chunk := raw.recv(65536):
                text += read_chunk
        assert b"shutting down" in text


def test_a_second_signal_does_not_wait(served_model: Path) -> None:
    with (
        Server(served_model, "--spec-type", "none", "-c", "32768") as server,
        begun(server.ready(), max_tokens=16000),
    ):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("shutting down")
        assert server.end() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_it_ends_when_nobody_reads_its_log_any_more(served_model: Path) -> None:
    """In `specdec serve 2>&1 | tee log` Ctrl-C also ends tee: the server drained forever."""
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


def test_requests_are_logged_on_demand(served_model: Path) -> None:
    with Server(served_model, *SMALL, "-v") as server:
        server.ready().post(COMPLETIONS, SHORT)
        server.get("/nothing")
        server.wait_for(r"^specdec: other 404, \d+\.\d\d s$")
        server.wait_for(rf"^specdec: {COMPLETIONS} 200, \d+\.\d\d s$")
        assert server.wait_for(r"chat page: (\S+)")[1] == server.url


def test_ctrl_c_is_130(mortal: Server) -> None:
    assert mortal.end(signal.SIGINT) == 130


# --- user errors ----------------------------------------------------------------------------------


def test_a_port_that_is_taken(served_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["serve", "-m", str(served_model), "--port", str(taken.getsockname()[1])]
        expect_error(capsys, argv, "cannot listen at 127.0.0.1", "--port")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "smolm"], "no such model: smolm is not a file or directory here; did you mean"),
        (["-m", "./nothing.gguf"], "no such model file: ./nothing.gguf: correct the path"),
        (["-m", "pair:target", "-md", "nothing"], "no such model: nothing"),
    ],
)
def test_a_name_that_is_no_models_is_told_before_anything_listens(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it would be told first
        port = str(taken.getsockname()[1])
        expect_error(capsys, ["serve", *argv, "--port", port], message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"model_type": ', "config.json is not valid JSON (line 1, column 16)"),
        ("config.json", b'{"model_type": "bert"}', "is an encoder (bert), which gives no next"),
        ("model.safetensors", b"\0" * 8, "model.safetensors"),
        ("model.gguf", b"GGUF", "model.gguf"),
    ],
)
def test_files_that_cannot_be_read_are_told_before_anything_listens(
    name: str,
    content: bytes,
    message: str,
    served_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(served_model, tmp_path / "model")
    (model / name).write_bytes(content)
    named = model / name if name.endswith("gguf") else model
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it would be told first
        argv = ["serve", "--port", str(taken.getsockname()[1])]
        expect_error(capsys, [*argv, "-m", str(named)], message)
        expect_error(capsys, [*argv, "-m", "pair:target", "-md", str(named)], message)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com"])
def test_others_need_a_key(
    host: str, served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "-m", str(served_model), "--host", host]
    expect_error(capsys, argv, "SPECDEC_API_KEY")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--api-key-file", "/nowhere/key"], "cannot read --api-key-file /nowhere/key"),
        (["--api-key-file", os.devnull], "printable"),
        (["--api-key", "a\nb"], "printable"),
        (["--api-key", "a", "--api-key-file", os.devnull], "not both"),
        (["--max-body", "lots"], "--max-body"),
        (["--max-queue", "0"], "--max-queue"),
        (["--port", "70000"], "--port"),
        (["--write-timeout", "0"], "--write-timeout"),
    ],
)
def test_options_that_make_no_sense(
    argv: list[str], named: str, served_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_error(capsys, ["serve", "-m", str(served_model), *argv], named)


def test_a_model_that_cannot_be_loaded(served_model: Path) -> None:
    with Server(served_model, "--memory-budget", "64MiB") as server:
        assert server.code() == 2, server.lines
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
    assert "pip install 'specdec-stream[serve]'" in done.stderr


def test_a_prompt_cache_that_cannot_be_written_to_is_told_at_the_start(served_model: Path) -> None:
    with Server(served_model, "--prompt-cache-dir", "/proc/self/task") as server:
        assert server.code() == 2, server.lines
        assert "/proc/self/task cannot be written to" in server.lines[-1], server.lines
