"""The memory budget of a running server: /v1/budget, SIGHUP, and an engine that is replaced."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import children, engine_of
from presets import PresetServer, preset
from serving import COMPLETIONS, LONG, Server, begun, events

from backends.contract.backend import BackendError
from backends.ggml.library import LlamaError
from offload.budget import BudgetExceeded
from offload.storage.direct_io import StorageError
from offload.units import MIB, UnitError
from specdec.api import ModelClosed
from specdec.engine.budget import BeamsRunning
from specdec.serve.api.budget import set_budget
from specdec.serve.errors import ApiError
from specdec.serve.process.translation import Log, translated

PATH = "/v1/budget"
OPTIONS = ("--spec-type", "none", "-c", "512")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    write(file, "2GiB")
    return file


def write(config: Path, budget: str) -> None:
    config.write_text(f'[serve]\nmemory-budget = "{budget}"\n')


@pytest.fixture
def configured(served_model: Path, config: Path) -> Iterator[Server]:
    environment = {"SPECDEC_CONFIG": str(config)}
    with Server(served_model, *OPTIONS, environment=environment) as started:
        yield started.ready()


def present(server: Server, query: str = "") -> Any:
    status, text = server.get(PATH + query)
    assert status == 200
    return json.loads(text)


def plan(server: Server) -> Any:
    return json.loads(server.get("/v1/plan")[1])


def wait_for_budget(server: Server, n_bytes: int) -> None:
    end = time.monotonic() + 60
    while True:
        status, text = server.get(PATH)
        if status == 200 and json.loads(text)["memory_budget_bytes"] == n_bytes:
            return
        assert time.monotonic() < end, text
        time.sleep(0.05)


def text_of(raw: Any, begin: bytes = b"") -> str:
    with raw:
        while b"[DONE]" not in begin:
            begin += raw.recv(65536)
    lines = begin.decode().replace("\r\n", "\n").splitlines()
    stream = "\n".join(line for line in lines if line.startswith("data:"))
    return "".join(event["choices"][0]["text"] for event in events(stream) if event["choices"])


def test_a_client_changes_it_in_the_midst_of_a_text(configured: Server) -> None:
    _, whole = configured.post(COMPLETIONS, LONG)
    raw = begun(configured)
    status, answer = configured.post(PATH, {"memory_budget": "1500MiB"})
    assert (status, answer["memory_budget_bytes"]) == (200, 1500 * MIB)
    assert answer == present(configured)
    assert plan(configured)["memory_budget_bytes"] == 1500 * MIB
    assert whole["choices"][0]["text"].endswith(text_of(raw))
    assert configured.metric("specdec_memory_budget_bytes") == 1500 * MIB
    configured.wait_for(r"the memory budget is 1\.46 GiB now")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"memory_budget": "50MiB"}, "the smallest budget that works is"),
        ({"memory_budget": "1000000GiB"}, "is above the limit of this process"),
        ({"memory_budget": "3.5"}, "has no unit"),
        ({"memory_budget": 0}, "must be positive"),
        ({"memory_budget": None}, "memory_budget"),
        ({}, "memory_budget"),
        ({"memory_budget": "2GiB", "memory_budgets": 1}, "memory_budget"),
    ],
)
def test_a_refused_budget_is_the_clients_error(server: Server, body: Any, message: str) -> None:
    before = present(server)
    status, answer = server.post(PATH, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"].startswith("memory_budget")
    assert present(server) == before


class Refusing:
    """A model whose budget cannot be changed, for a reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set_memory_budget(self, memory_budget: str | int) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BudgetExceeded("KV", 3 * MIB, MIB, 9 * MIB), 400, "the smallest budget that works is 9 M"),
        (UnitError("no unit"), 400, "no unit"),
        (BeamsRunning("12 beams"), 400, "12 beams"),
        (StorageError("gone"), 500, "the model failed; the server's log says why"),
        (LlamaError("no context"), 500, "the model failed; the server's log says why"),
        (BackendError("no memory"), 500, "the model failed; the server's log says why"),
        (MemoryError(), 500, "an error inside the server; its log says where"),
        (ModelClosed(), 503, "the server is shutting down: ask another one"),
    ],
)
def test_a_failure_of_loading_again_is_the_servers_error(
    error: Exception, status: int, message: str
) -> None:
    failures: list[tuple[ApiError, bool]] = []
    lines: list[str] = []
    llm: Any = Refusing(error)
    with translated(lambda *failure: failures.append(failure), Log(lines.append)):
        set_budget(64 * MIB, llm)
    ((failure, is_storage),) = failures
    assert failure.status == status
    assert message in failure.message
    assert failure.param == ("memory_budget" if status == 400 else None)
    assert is_storage == isinstance(error, StorageError)
    assert len(lines) == (status == 500)


def test_sighup_reads_the_config_again(configured: Server, config: Path) -> None:
    raw = begun(configured)
    write(config, "1400MiB")
    configured.process.send_signal(signal.SIGHUP)
    wait_for_budget(configured, 1400 * MIB)
    text_of(raw)
    write(config, "10MiB")
    configured.process.send_signal(signal.SIGHUP)
    configured.wait_for("the memory budget stays as it is: this run needs")
    config.write_text("[serve]\nmemory-budgets = 1\n")
    configured.process.send_signal(signal.SIGHUP)
    configured.wait_for("the memory budget stays as it is: .* does not have an option")
    assert present(configured)["memory_budget_bytes"] == 1400 * MIB


def test_a_given_option_takes_precedence_at_sighup(served_model: Path, config: Path) -> None:
    environment = {"SPECDEC_CONFIG": str(config)}
    argv = (*OPTIONS, "--memory-budget", "1GiB")
    with Server(served_model, *argv, environment=environment) as server:
        server.ready()
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("stays as it is: --memory-budget was given, and takes precedence over")
        assert present(server)["memory_budget_bytes"] == 1024 * MIB


def test_sighup_ends_a_server_with_no_config_but_the_users_own(
    served_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "specdec").mkdir()
    write(tmp_path / "specdec" / "config.toml", "2GiB")
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    with Server(served_model, *OPTIONS, environment=environment) as server:
        server.ready()
        assert server.end(signal.SIGHUP) in (-signal.SIGHUP, 128 + signal.SIGHUP)


def test_an_engine_that_is_replaced_gets_the_present_budget(configured: Server) -> None:
    configured.post(PATH, {"memory_budget": "1300MiB"})
    configured.post(COMPLETIONS, {**LONG, "max_tokens": 1})
    os.kill(engine_of(configured), signal.SIGKILL)
    configured.wait_for("it is started again")
    wait_for_budget(configured, 1300 * MIB)
    end = time.monotonic() + 60
    while len([line for line in configured.lines if "the memory budget is" in line]) < 2:
        assert time.monotonic() < end, configured.lines
        time.sleep(0.05)
    assert plan(configured)["memory_budget_bytes"] == 1300 * MIB


def test_models_of_a_preset_divide_the_servers_budget(served_model: Path, tmp_path: Path) -> None:
    model = json.dumps(str(served_model))
    common = 'spec-type = "none"\nctx-size = 256\n'
    section = f'model = {model}\nmemory-budget = "900MiB"\n'
    path = preset(tmp_path, f"{common}[a]\n{section}[b]\n{section}")
    with PresetServer(path, "--memory-budget", "3GiB") as server:
        server.ready()
        status, text = server.get(PATH)
        assert (status, json.loads(text)["error"]["param"]) == (400, "model")
        status, answer = server.post(PATH, {"memory_budget": "1GiB"})
        assert (status, answer["error"]["message"]) == (400, "name a model: one of a, b")
        status, answer = server.post(f"{PATH}?model=a", {"memory_budget": "1GiB"})
        assert (status, answer["error"]["code"]) == (503, "model_not_loaded")

        assert server.post(COMPLETIONS, {**LONG, "max_tokens": 2, "model": "a"})[0] == 200
        (engine,) = children(server.process.pid)
        assert server.post(COMPLETIONS, {**LONG, "max_tokens": 2, "model": "b"})[0] == 200
        status, answer = server.post(f"{PATH}?model=a", {"memory_budget": "1GiB"})
        assert (status, answer["memory_budget_bytes"]) == (200, 1024 * MIB)
        assert json.loads(server.get(f"{PATH}?model=a")[1]) == answer
        server.wait_for(r"a: the memory budget is 1\.00 GiB now")

        status, rest = server.post(f"{PATH}?model=b", {"memory_budget": "auto"})
        assert status == 200
        assert 1536 * MIB < rest["memory_budget_bytes"] < 2048 * MIB, "what a and the server leave"
        for budget in ("1025MiB", 1025 * MIB):
            status, answer = server.post(f"{PATH}?model=a", {"memory_budget": budget})
            assert (status, answer["error"]["param"]) == (400, "memory_budget")
            message = answer["error"]["message"]
            assert "of 1.00 GiB for a is above the 1024 MiB (1.00 GiB) that the other" in message

        os.kill(engine, signal.SIGKILL)
        server.wait_for("a: .*it is started again")
        end = time.monotonic() + 60
        while server.post(COMPLETIONS, {**LONG, "max_tokens": 2, "model": "a"})[0] != 200:
            assert time.monotonic() < end
        assert present(server, "?model=a")["memory_budget_bytes"] == 1024 * MIB
        assert present(server, "?model=b") == rest
        assert server.end(signal.SIGHUP) in (-signal.SIGHUP, 128 + signal.SIGHUP)
