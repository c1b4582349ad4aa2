"""The real command on a real model, killed by SIGKILL wherever it is."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from command_line import start
from tiny_pair import save_model

N_KILLS = 10


def write_requests(path: Path) -> Path:
    """Greedy and sampled ones of both formats, and some that are none."""
    with open(path, "w") as file:
        for index in range(150):
            if index % 30 == 7:
                file.write('{"prompt": \n')
                continue
            line: dict = {"prompt": f"prompt {index}", "max_tokens": 1 + index % 40}
            if index % 3 == 1:
                line["temperature"] = 1.0
            if index % 4 == 2:
                body = {"model": "m", **line}
                url = "/v1/completions"
                line = {"custom_id": str(index), "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def n_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes, each of which imports torch
def test_ten_kills_leave_the_output_of_an_undisturbed_run(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    source = write_requests(tmp_path / "in.jsonl")

    def argv(out: str) -> list[str]:
        return ["batch", str(source), "-m", str(model), "--threads", "1", "-o", out, "-c", "128"]

    expected, out = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    _, err = start(argv(str(expected))).communicate(timeout=200)
    assert expected.exists(), err.decode()
    chance = random.Random(1)
    step = len(expected.read_bytes()) // (N_KILLS + 2)
    n_killed = 0
    while n_killed < N_KILLS:
        process = start(argv(str(out)))
        goal = n_bytes(partial) + chance.randrange(step)
        while n_bytes(partial) <= goal and process.poll() is None:
            time.sleep(chance.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err.decode()
        n_killed += 1
    assert not out.exists()
    _, err = start(argv(str(out))).communicate(timeout=200)
    assert out.read_bytes() == expected.read_bytes(), err.decode()
    assert b"of them before" in err
    numbers = [index + 1 for index in range(150)]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [one.get("line") or int(one["id"].split("_")[2]) for one in records]
    assert found == numbers
    assert not partial.exists()
