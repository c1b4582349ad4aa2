"""The real command on a real model, killed by SIGKILL wherever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_pair import save_model

from bench.checks import kills

N_KILLS = 3
"""Ten, of a larger model, are `python -m bench.checks.kills`."""


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


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes, each of which imports torch
def test_kills_leave_the_output_of_an_undisturbed_run(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    source = write_requests(tmp_path / "in.jsonl")
    argv = [str(source), "-m", str(model), "--threads", "1", "-c", "128"]
    found = kills.run(argv, tmp_path, N_KILLS, seed=1)
    assert found["is_equal"]
    assert (found["n_records"], found["n_lost"], found["n_twice"]) == (150, 0, 0)
    assert len(found["n_bytes_after_kills"]) == N_KILLS
    assert found["n_bytes_after_kills"][-1] > 0
    assert not (tmp_path / "killed.jsonl.partial").exists()
