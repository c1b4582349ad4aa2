"""The real command on a real model, killed by SIGKILL at any point."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from crashed_batches import LOG_BYTES, finish, kill
from tiny_pair import save_model

from specdec.batch.records import key_of

N_LINES, N_KILLS = 60, 3


def write_requests(path: Path) -> Path:
    """Write greedy and sampled requests of both formats, and some invalid ones."""
    with open(path, "w") as file:
        for index in range(N_LINES):
            if index % 20 == 7:
                file.write('{"prompt": \n')
                continue
            line: dict = {"prompt": f"prompt {index}", "max_tokens": 1 + index % 30}
            if index % 3 == 1:
                line["temperature"] = 1.0
            if index % 4 == 2:
                body = {"model": "m", **line}
                url = "/v1/completions"
                line = {"custom_id": str(index), "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


@pytest.mark.slow
def test_kills_leave_the_output_of_an_undisturbed_run(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    source = write_requests(tmp_path / "in.jsonl")
    argv = [str(source), "-m", str(model), "--threads", "1", "-c", "128", "--parallel", "4"]
    undisturbed = finish(argv, tmp_path / "undisturbed.jsonl")
    out, chance = tmp_path / "killed.jsonl", random.Random(1)
    max_bytes = N_LINES * LOG_BYTES // (N_KILLS + 2)
    n_bytes = [kill(argv, out, max_bytes, chance) for _ in range(N_KILLS)]
    assert n_bytes[-1] > 0
    assert finish(argv, out) == undisturbed
    keys = [key_of(line) for line in undisturbed.splitlines(keepends=True)]
    assert len(keys) == len(set(keys)) == N_LINES
    assert not (tmp_path / "killed.jsonl.partial").exists()
