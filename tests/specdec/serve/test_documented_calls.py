"""The calls in docs/server.md, as written there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from serving import ROOT, Server, events

PAGE = (ROOT / "docs" / "server.md").read_text()
SHOWN_URL = "http://127.0.0.1:8080"
CALLS = re.findall(r"^```\n(curl .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KEY = "s3cret"


@pytest.fixture(scope="module")
def served_pair() -> Iterator[Server]:
    more = ("-md", "pair:draft", "-c", "256")
    with Server("pair:target", *more, environment={"SPECDEC_API_KEY": KEY}) as started:
        yield started.ready()


def call(server: Server, text: str) -> str:
    """Return the output of a call; add the key if missing, since the documented server has none."""
    text = text.replace(SHOWN_URL, server.url)
    if "Authorization" not in text:
        text = text.replace("curl ", f"curl -H 'Authorization: Bearer {KEY}' ", 1)
    environment = {"PATH": "/usr/bin:/bin", "SPECDEC_API_KEY": KEY}
    argv = ["bash", "-c", text.replace("curl ", "curl -sS --fail-with-body ", 1)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_as_many_as_were_written() -> None:
    assert (len(CALLS), len(PROGRAMS)) == (5, 1)


@pytest.mark.parametrize("text", CALLS, ids=range(len(CALLS)))
def test_a_call_is_answered(served_pair: Server, text: str) -> None:
    answer = call(served_pair, text)
    if "/metrics" in text:
        assert "specdec_passes_total" in answer
    elif '"stream": true' in text:
        *reported, last = events(answer)
        assert last["usage"]["completion_tokens"] > 0
        assert "".join(item["choices"][0]["delta"].get("content", "") for item in reported)
    elif "json_schema" in text:
        assert set(json.loads(json.loads(answer)["choices"][0]["message"]["content"])) == {"name"}
    else:
        assert json.loads(answer)["usage"]["completion_tokens"] > 0


@pytest.mark.slow
def test_a_program_runs(served_pair: Server) -> None:
    pytest.importorskip("openai")
    (program,) = PROGRAMS
    program = program.replace(SHOWN_URL, served_pair.url).replace('"none"', f'"{KEY}"')
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
