"""`specdec serve --ray`: an engine on each of two nodes of a local Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

from engines import is_alive, wait_until_gone
from serving import COMPLETIONS, SHORT, OwnServer, begun, events

OPTIONS = ("--spec-type", "none", "-c", "8192", "--memory-budget", "1GiB", "--parallel", "4")
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
SECONDS = 120


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, condition
        time.sleep(0.05)
    return result


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, own_folder(patch):
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            made.add_node(**NODE)
            yield made
        finally:
            made.shutdown()


@contextmanager
def own_folder(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Ray keep its files in a folder that is removed at the end."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets have short paths
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # Ray would leave one in ~/.ray
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture
def server(served_model: Path, cluster: Any) -> Iterator[OwnServer]:
    with OwnServer(served_model, *OPTIONS, "--ray", cluster.address, "--replicas", "2") as server:
        server.wait_for("ready: ", SECONDS)
        yield server
    until(lambda: not processes("ray::EngineRelay"))


def processes(words: str) -> list[psutil.Process]:
    """Return the processes whose command begins with these words."""
    actual = []
    for item in psutil.process_iter():
        try:
            if " ".join(item.cmdline()).startswith(words):
                actual.append(item)
        except psutil.Error:
            continue
    return actual


def engines() -> list[int]:
    return [
        child.pid for relay in processes("ray::EngineRelay") for child in relay.children() if child
    ]


def ask(server: OwnServer, prompt: str, **more: Any) -> Any:
    status, answer = server.post(COMPLETIONS, {**SHORT, "prompt": prompt, **more})
    assert status == 200, answer
    return answer


def generated(server: OwnServer) -> list[float]:
    name = 'specdec_generated_tokens_total{replica="%d"}'
    return [server.metric(name % number) for number in (1, 2)]


def rest(raw: Any) -> list[Any]:
    data = b""
    with raw:
        raw.settimeout(SECONDS)
        while part := raw.recv(65536):
            data += part
            if b"[DONE]" in part:
                break
    lines = data.decode().replace("\r\n", "\n").splitlines()
    return list(events("\n".join(line for line in lines if line.startswith("data: "))))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray, and several processes that import torch
def test_two_replicas(server: OwnServer) -> None:
    health = json.loads(server.get("/health")[1])
    assert health == {"status": "ready", "replicas": ["ready", "ready"]}
    assert json.loads(server.get("/v1/models")[1])["data"][0]["replicas"] == 2
    assert json.loads(server.get("/props")[1])["total_slots"] == 8
    assert len(engines()) == 2

    # The same prefix goes to the same replica, other prompts to the other one.
    prompts = ["abc " * 80, "xyz " * 80]
    first = [ask(server, prompt) for prompt in prompts]
    assert generated(server) == [2, 2]
    for prompt in (prompts[0], prompts[0] + "more", prompts[0]):
        usage = ask(server, prompt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200
    assert sorted(generated(server)) == [2, 8]
    assert server.metric('specdec_routed_requests_total{by="prefix"}') == 3
    assert server.metric('specdec_routed_requests_total{by="load"}') == 2

    # Both give the same text.
    for _ in range(2):
        again = [ask(server, prompt, cache_prompt=False) for prompt in prompts]
        assert [item["choices"] for item in again] == [item["choices"] for item in first]
    assert sum(generated(server)) == 18

    # One engine is killed: its streams end with an error, the other ones go on.
    streams = [begun(server, prompt=f"{i}" * 200, **LONG) for i in range(4)]
    killed = engines()[0]
    os.kill(killed, signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        last = [items[-1] for items in pool.map(rest, streams)]
    lost = [item["error"]["code"] for item in last if "error" in item]
    assert lost == ["engine_lost"] * 2
    assert ask(server, "at once")
    server.wait_for(r"replica \d: error: the engine was killed by SIGKILL.*started again")
    assert server.get("/health")[0] == 200
    until(lambda: json.loads(server.get("/health")[1])["replicas"] == ["ready", "ready"])
    assert len(engines()) == 2
    assert killed not in engines()
    name = 'specdec_engine_restarts_total{replica="%d"}'
    assert sum(server.metric(name % number) for number in (1, 2)) == 1

    status, answer = server.post("/v1/budget", {"memory_budget": "900MiB"})
    assert (status, answer["memory_budget_bytes"]) == (200, 900 << 20)
    name = 'specdec_memory_budget_bytes{replica="%d"}'
    assert [server.metric(name % number) for number in (1, 2)] == [900 << 20] * 2

    left = engines()
    assert server.end() == 0
    for pid in left:
        wait_until_gone(pid)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_end_with_a_server_that_is_killed(server: OwnServer) -> None:
    stream = begun(server, prompt="a", **LONG)
    left = engines()
    assert len(left) == 2
    server.process.kill()
    for pid in left:
        wait_until_gone(pid)
    stream.close()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_is_gone(server: OwnServer, cluster: Any) -> None:
    """The replica there waits for another machine."""
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    server.wait_for(r"replica \d: error: the engine was lost: .*; it is started again", SECONDS)
    server.wait_for(r"replica \d: its machine is gone, and no other one is free", SECONDS)
    assert ask(server, "the other one answers")
    cluster.add_node(**NODE)
    until(lambda: json.loads(server.get("/health")[1])["replicas"] == ["ready", "ready"])
    assert server.end() == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_is_too_small(served_model: Path, cluster: Any) -> None:
    with OwnServer(served_model, *OPTIONS, "--ray", cluster.address, "--replicas", "3") as server:
        assert server.process.wait(SECONDS) == 2
        assert "--replicas is 3, but the Ray cluster has 2 machines" in "".join(server.lines)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_of_this_machine_alone(
    served_model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = own_folder(monkeypatch)
    with folder, OwnServer(served_model, *OPTIONS, "--ray", "auto") as server:
        server.wait_for("ready: ", SECONDS)
        assert ask(server, "a")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        assert server.end(number) == (0 if number == signal.SIGTERM else -number)
        for child in children:
            until(lambda pid=child.pid: not is_alive(pid))
