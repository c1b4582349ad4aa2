"""`specdec serve --preset`: its file, and a server of several models."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import expect_error
from engines import children, wait_until_gone
from presets import PresetServer, preset
from serving import COMPLETIONS, SHORT, Server, events

from offload.process.limited import FAILED, Limits, Outcome
from specdec.cli.app import main

COMMON = 'spec-type = "none"\nctx-size = 256\nparallel = 2\n'


@pytest.fixture(scope="module")
def server(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose budget holds one of two models at a time."""
    folder = tmp_path_factory.mktemp("preset")
    model = json.dumps(str(served_model))
    text = f'{COMMON}[tiny]\nmodel = {model}\nalias = "small"\n\n["a/other"]\nmodel = {model}\n'
    with PresetServer(preset(folder, text), "--memory-budget", "1.2GiB") as started:
        yield started.ready()


def states(server: Server) -> dict[str, str]:
    status, text = server.get("/health")
    value = json.loads(text)
    assert (status, value["status"]) == (200, "ready")
    return dict(value["models"])


def test_several_models_take_turns_in_one_budget(server: Server) -> None:
    assert states(server) == {"tiny": "unloaded", "a/other": "unloaded"}
    assert not children(server.process.pid)
    engines = []
    for name in ("tiny", "a/other", "small"):
        status, answer = server.post(COMPLETIONS, {**SHORT, "model": name})
        assert status == 200, answer
        assert answer["model"] == ("tiny" if name == "small" else name)
        (engine,) = children(server.process.pid)
        engines.append(engine)
    assert len(set(engines)) == 3
    assert states(server) == {"tiny": "ready", "a/other": "unloaded"}
    assert server.metric('specdec_model_state{model="tiny",state="ready"}') == 1
    assert server.metric('specdec_generated_tokens_total{model="tiny"}') > 0
    assert server.metric('specdec_engine_restarts_total{model="a/other"}') == 0


def test_names_of_requests(server: Server) -> None:
    status, answer = server.post(COMPLETIONS, {**SHORT, "model": "tinny"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "did you mean tiny?" in answer["error"]["message"]
    status, answer = server.post(COMPLETIONS, SHORT)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert server.get("/v1/plan")[0] == 400
    assert server.get("/v1/models/none")[0] == 404


def test_descriptions_say_what_is_loaded(server: Server) -> None:
    assert server.post("/tokenize", {"model": "tiny", "content": "a"})[0] == 200
    cards = json.loads(server.get("/v1/models")[1])["data"]
    assert [(card["id"], card["status"]["value"]) for card in cards] == [
        ("tiny", "loaded"),
        ("small", "loaded"),
        ("a/other", "unloaded"),
    ]
    assert {card["max_model_len"] for card in cards} == {256}
    tags = json.loads(server.get("/api/tags")[1])["models"]
    assert [item["name"] for item in tags] == ["tiny", "small", "a/other"]
    loaded = json.loads(server.get("/api/ps")[1])["models"]
    assert [item["name"] for item in loaded] == ["tiny", "small"]
    assert loaded[0]["size"] > 0
    assert loaded[0]["expires_at"] < "9999"
    assert json.loads(server.get("/v1/plan?model=tiny")[1])["ctx_size"] == 256
    assert json.loads(server.get("/props?model=small")[1])["model_alias"] == "tiny"
    assert server.post("/api/show", {"model": "a/other"})[0] == 200


def test_ollamas_clients_load_and_unload(server: Server) -> None:
    status, answer = server.post("/api/generate", {"model": "a/other", "keep_alive": -1})
    assert (status, answer["done_reason"]) == (200, "load")
    (item,) = json.loads(server.get("/api/ps")[1])["models"]
    assert (item["name"], item["expires_at"][:4]) == ("a/other", "9999")
    (engine,) = children(server.process.pid)
    status, answer = server.post("/api/chat", {"model": "a/other", "keep_alive": 0})
    assert (status, answer["done_reason"]) == (200, "unload")
    wait_until_gone(engine)
    end = time.monotonic() + 30
    while states(server)["a/other"] != "unloaded":
        assert time.monotonic() < end
    assert server.post("/api/generate", {"model": "tiny", "keep_alive": "soon"})[0] == 400


def test_a_stream_waits_for_its_model(server: Server) -> None:
    for name in ("tiny", "a/other"):
        raw = server.post_raw(COMPLETIONS, {**SHORT, "model": name, "stream": True})
        raw.settimeout(60)
        text = b""
        while b"[DONE]" not in text:
            text += raw.recv(65536)
        raw.close()
        lines = text.decode().replace("\r\n", "\n")
        data = "\n".join(line for line in lines.splitlines() if line.startswith("data:"))
        assert events(data)[-1]["choices"][0]["finish_reason"] == "length"


# --- the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ctx-size = 64\n", "has no model: write a section for each"),
        ("[a.b]\nmodel = 'x'\n", "[a] has a section in it: put a name with dots in quotes"),
        ("[a]\nmodle = 'x'\n", "[a] has no option modle: did you mean model?"),
        ("host = 'x'\n[a]\n", "has no option host"),
        ("[a]\nctx-size = 'many'\n", "[a]: "),
        ("[a]\nctx-size = -1\n", "[a]: Invalid value for '-c' / '--ctx-size'"),
        ("[a]\nkeep-alive = 'soon'\n", "[a] keep-alive is 'soon', must be 5m"),
        ("[a]\nload-on-startup = 1\n", "[a] load-on-startup is 1, must be true or false"),
        ("[a]\nalias = 'b'\n[b]\n", "two models have the name b"),
        ("[a]\nmodel = ['x', 'y']\n", "is a list, but takes one value"),
        ("[a\n", "cannot be read as TOML"),
    ],
)
def test_a_file_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    expect_error(capsys, ["serve", "--preset", str(preset(tmp_path, text))], message)


def test_options_that_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(preset(tmp_path, "[a]\n"))
    expect_error(capsys, ["serve", "--preset", path, "-m", "x"], "give either -m or --preset")
    expect_error(capsys, ["serve", "--preset", path, "--alias", "x"], "--alias names one model")
    expect_error(capsys, ["serve"], "name a model with -m, or several with --preset FILE")
    expect_error(capsys, ["serve", "-m", "x", "--keep-alive", "soon"], "--keep-alive is 'soon'")


@pytest.mark.parametrize(
    ("own", "message"),
    [("", "the model tiny cannot be loaded: .*smallest budget that works is [0-9]+ MiB"),
     ('memory-budget = "3GiB"', "its memory budget of 3GiB is above the")],
)  # fmt: skip
def test_a_model_that_never_fits_is_refused_at_the_start(
    served_model: Path, tmp_path: Path, own: str, message: str
) -> None:
    model = json.dumps(str(served_model))
    path = preset(tmp_path, f"{COMMON}[tiny]\nmodel = {model}\n{own}\n")
    with PresetServer(path, "--memory-budget", "400MiB") as server:
        server.process.wait(60)
        end = time.monotonic() + 10
        while not any(re.search(message, line) for line in server.lines):
            assert time.monotonic() < end, server.lines
            time.sleep(0.01)


@pytest.mark.parametrize(("typed", "size"), [((), 3), (("--memory-budget", "2GiB"), 2)])
def test_the_files_budget_is_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...], size: int
) -> None:
    def limited(command: list[str], limits: Limits, env: dict[str, str]) -> Outcome:
        assert limits == Limits(size << 30)
        return Outcome(FAILED, 7, 1.0, 0, 0, 0)

    monkeypatch.setattr("specdec.cli.enforce.run_limited", limited)
    path = preset(tmp_path, "memory-budget = '3GiB'\n[a]\n")
    assert main(["serve", "--preset", str(path), "--enforce", *typed]) == 7


# --- a preset of one model --------------------------------------------------------------------


def test_the_only_model_of_a_preset_is_loaded_on_demand(served_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(served_model, model)
    text = f"{COMMON}[tiny]\nmodel = {json.dumps(str(model))}\n"
    with PresetServer(preset(tmp_path, text), "--memory-budget", "1.2GiB") as server:
        server.ready()
        assert not any("loading tiny" in line for line in server.lines)
        assert states(server) == {"tiny": "unloaded"}
        (card,) = json.loads(server.get("/v1/models")[1])["data"]
        assert (card["id"], card["status"]["value"]) == ("tiny", "unloaded")
        assert server.get("/api/ps") == (200, '{"models":[]}')
        model.rename(tmp_path / "elsewhere")
        status, answer = server.post(COMPLETIONS, {**SHORT, "model": "tiny"})
        assert (status, answer["error"]["code"]) == (503, "model_load_failed")
        assert states(server) == {"tiny": "unloaded"}
        (tmp_path / "elsewhere").rename(model)
        assert server.post(COMPLETIONS, {**SHORT, "model": "tiny"})[0] == 200
        server.wait_for("tiny is loaded")
        (item,) = json.loads(server.get("/api/ps")[1])["models"]
        assert item["name"] == "tiny"
        assert server.end() == 0


# --- one model --------------------------------------------------------------------------------


def test_the_only_model_may_be_unloaded_when_idle(served_model: Path) -> None:
    options = ("--spec-type", "none", "-c", "256", "--keep-alive", "500ms")
    with Server(served_model, *options) as server:
        (engine,) = children(server.ready().process.pid)
        wait_until_gone(engine)
        end = time.monotonic() + 30
        while children(server.process.pid):
            assert time.monotonic() < end
        assert server.get("/health")[0] == 200, "it takes requests"
        assert server.get("/api/ps") == (200, '{"models":[]}')
        assert server.post(COMPLETIONS, {**SHORT, "keep_alive": 0})[0] == 200
        assert server.end() == 0
