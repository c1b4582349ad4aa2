"""Many clients at once; clients that disconnect, that read nothing, that take too long."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from disconnecting import disconnect
from serving import COMPLETIONS, LONG, SHORT, SMALL, Server, begun, events

IMPATIENT = ("--write-timeout", "1", "--max-choices", "200", "--max-logprobs", "10000000")


@pytest.fixture(scope="module")
def small(served_model: Path) -> Iterator[Server]:
    """A small model for the tests that leave it running."""
    with Server(served_model, *SMALL, *IMPATIENT) as started:
        yield started.ready()


def test_a_client_that_disconnects_ends_its_sequence(small: Server) -> None:
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


@pytest.mark.slow
def test_many_clients_that_go_away_leave_nothing(small: Server) -> None:
    """No threads, files, requests or KV stay: a sequence of the whole context still fits."""
    assert disconnect(small, n_clients=30) == {}
    whole = {"prompt": [1] * 256, "max_tokens": 255, "ignore_eos": True}
    _, answer = small.post(COMPLETIONS, whole)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_says_so(small: Server) -> None:
    raws = [begun(small), *(small.post_raw(COMPLETIONS, SHORT) for _ in range(2))]
    while small.metric("specdec_requests_inside") < 3:
        time.sleep(0.01)
    status, answer = small.post(COMPLETIONS, SHORT)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    raws[0].close()
    for raw in raws[1:]:  # the waiting ones are answered
        raw.settimeout(60)
        assert b" 200 " in raw.recv(65536).split(b"\r\n")[0]
        raw.close()
    assert small.get("/health")[0] == 200


def test_idle_connections_beyond_the_limit_are_closed(served_model: Path) -> None:
    """Idle connections make no request; active ones are always served."""
    more = ("--max-connections", "2", "--read-timeout", "120")
    with Server(served_model, *more) as server, ExitStack() as stack:
        at = ("127.0.0.1", server.ready().port)
        idle = [stack.enter_context(socket.create_connection(at)) for _ in range(6)]
        assert server.get("/v1/models")[0] == 200
        end = time.monotonic() + 60
        while len(select.select(idle, [], [], 0.1)[0]) < 4:
            assert time.monotonic() < end, "they are open"
        closed = select.select(idle, [], [], 0)[0]
        assert [raw.recv(1) for raw in closed] == [b""] * 4
        cached = next(raw for raw in idle if raw not in closed)
        cached.settimeout(60)
        cached.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in cached.recv(4096)


@pytest.mark.slow
def test_forty_at_once_before_a_queue_of_12(served_model: Path) -> None:
    """Every request is answered, and each scheduled one has the output that it has alone."""
    more = ("--spec-type", "none", "-c", "256", "--kv-tokens", "4096", "--max-queue", "12")
    body, prompts = {**LONG, "max_tokens": 120}, [f"{i} is " for i in range(40)]
    with Server(served_model, *more) as server, ExitStack() as stack:
        server.ready()
        raws = [
            stack.enter_context(server.post_raw(COMPLETIONS, {**body, "prompt": prompt}))
            for prompt in prompts
        ]
        answers = [answer_of(raw) for raw in raws]
        let_in = [i for i, (status, _) in enumerate(answers) if status == 200]
        assert {status for status, _ in answers} == {200, 429}
        assert len(let_in) >= 12
        for first in range(0, len(let_in), 8):
            some = let_in[first : first + 8]
            _, alone = server.post(COMPLETIONS, {**body, "prompt": [prompts[i] for i in some]})
            strings = [choice["text"] for choice in alone["choices"]]
            assert [answers[i][1]["choices"][0]["text"] for i in some] == strings
        assert server.metric("specdec_requests_inside") == 0


def answer_of(raw: socket.socket) -> tuple[int, Any]:
    raw.settimeout(120)
    response = HTTPResponse(raw)
    response.begin()
    return response.status, json.loads(response.read())


def test_many_at_once_are_not_mixed_up(server: Server) -> None:
    prompts = [f"number {i}: " for i in range(12)]
    body = {"max_tokens": 10, "temperature": 0}
    alone = [server.post(COMPLETIONS, {**body, "prompt": prompt})[1] for prompt in prompts]
    actual: dict[int, Any] = {}

    def ask(i: int) -> None:
        actual[i] = server.post(COMPLETIONS, {**body, "prompt": prompts[i]})[1]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, answer in enumerate(alone):
        assert actual[i]["choices"] == answer["choices"]


def test_a_silent_request_has_its_time(served_model: Path) -> None:
    """A request that waits for its turn is silent; one that gets text may take longer."""
    more = ("--spec-type", "none", "-c", "32768", "--parallel", "1", "--request-timeout", "1")
    with Server(served_model, *more) as server, begun(server.ready(), max_tokens=16000):
        begin = time.monotonic()
        status, answer = server.post(COMPLETIONS, SHORT)
        assert (status, answer["error"]["type"]) == (408, "timeout_error")
        with server.post_raw(COMPLETIONS, SHORT) as raw:
            raw.settimeout(60)
            assert b"x-should-retry: false" in raw.recv(65536).lower()  # by OpenAI's clients
        assert time.monotonic() - begin > 2
        with server.post_raw(COMPLETIONS, {**SHORT, "stream": True}) as raw:
            raw.settimeout(60)
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += raw.recv(65536)
        answers = events(text.decode().replace("\r\n", "\n"))
        assert answers[-1]["error"]["type"] == "timeout_error"
        while server.metric("specdec_requests_inside") != 1:  # the first one goes on
            assert time.monotonic() - begin < 60


def test_a_client_that_reads_nothing_is_cut(small: Server) -> None:
    """The output ends, and the next waiting request is served."""
    ended = 'specdec_requests_total{path="/v1/completions",status="200"}'
    assert small.post(COMPLETIONS, SHORT)[0] == 200
    before, num_ended = small.metric("specdec_generated_tokens_total"), small.metric(ended)
    # Greedy output is computed once and sent `n` times: few tokens fill the kernel's buffers, with
    # so many log-probabilities before the fastest machine has computed all.
    with small.post_raw(COMPLETIONS, {**LONG, "stream": True, "logprobs": 20, "n": 200}):
        end = time.monotonic() + 60
        while small.metric(ended) == num_ended:  # it is cut a second after its first bytes
            assert time.monotonic() < end, "it is still there"
            time.sleep(0.01)
        small.wait_until_free(240)
    assert small.metric("specdec_generated_tokens_total") - before < 480
    assert small.post(COMPLETIONS, SHORT)[0] == 200


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_all(served_model: Path) -> None:
    """The connection has no request any more, and still a part of the answer."""
    body = {**LONG, "max_tokens": 120, "logprobs": 20, "n": 200}
    with Server(served_model, *SMALL, *IMPATIENT[2:], "--read-timeout", "0.5") as server:
        server.ready()
        with server.post_raw(COMPLETIONS, body) as raw:
            raw.settimeout(60)
            raw.recv(1, socket.MSG_PEEK)
            time.sleep(3)
            status, answer = answer_of(raw)
        assert (status, len(answer["choices"])) == (200, 200)


def test_clients_that_do_not_take_the_end_of_an_answer_are_cut(small: Server) -> None:
    """The short answer was already in the server's buffer: the connection stayed forever."""
    files = Path(f"/proc/{small.process.pid}/fd")
    before = len(list(files.iterdir()))
    with ExitStack() as stack:
        for n_answers in range(2, 242, 3):  # the kernel's buffer size is unknown
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.connect(("127.0.0.1", small.port))
            raw.sendall(b"GET /page/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * n_answers)
        end = time.monotonic() + 120
        while len(list(files.iterdir())) > before:
            assert time.monotonic() < end, "a connection is still open"
            time.sleep(0.2)
