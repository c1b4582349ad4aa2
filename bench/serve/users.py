"""What users of a server get: one alone, eight at once, one who comes while others decode; and what
the server takes of what the library gives.

python -m bench.serve.users -m TARGET -md DRAFT --memory-budget 3GiB
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

from bench.serve.server import ServerUnderTest, served

_PATH = "/v1/completions"
_PROMPTS = (
    "def area(r):",
    "def read_file(path):",
    "class Stack:",
    "def fibonacci(n):",
    "import os\n\ndef walk(folder):",
    "def test_sum():",
    "def to_celsius(degrees):",
    "for line in lines:",
)
_LIBRARY = """
import json, sys, time
import specdec
prompt, n_tokens, options = json.loads(sys.argv[1])
with specdec.load(**options) as llm:
    llm.generate(prompt, max_tokens=4, ignore_eos=True)
    begin = time.monotonic()
    llm.generate(prompt, max_tokens=n_tokens, ignore_eos=True)
    print(json.dumps(time.monotonic() - begin))
"""


def _body(prompt: str, n_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}


def seconds_of(server: ServerUnderTest, n_users: int, n_tokens: int) -> float:
    """From the first request to the last answer, of users who all come at once."""
    bodies = [_body(_PROMPTS[i % len(_PROMPTS)], n_tokens) for i in range(n_users)]
    threads = [threading.Thread(target=server.post, args=(_PATH, body)) for body in bodies]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - begin


def joining(server: ServerUnderTest, n_others: int, n_tokens: int) -> dict[str, float]:
    """Seconds and passes from a request to its first token, beside others who decode."""
    others = threading.Thread(target=seconds_of, args=(server, n_others, n_tokens))
    others.start()
    while server.figures()["texts_running"] < n_others:
        time.sleep(0.05)
    n_passes, begin = server.figures()["passes_total"], time.monotonic()
    with server.open(_PATH, {**_body("def join(words):", 4), "stream": True}) as events:
        while not events.readline().startswith(b"data:"):
            pass  # a comment: still waiting
        seconds = time.monotonic() - begin
        n_passes = server.figures()["passes_total"] - n_passes
    others.join()
    return {"first_token_seconds": seconds, "first_token_passes": n_passes}


def seconds_of_library(options: dict[str, Any], n_tokens: int) -> float:
    argv = [sys.executable, "-c", _LIBRARY, json.dumps([_PROMPTS[0], n_tokens, options])]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--draft-model")
    parser.add_argument("--memory-budget", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    asked = vars(parser.parse_args())
    n_users, n_tokens = asked.pop("users"), asked.pop("tokens")
    options = {name: value for name, value in asked.items() if value is not None}
    words = [
        w for name, value in options.items() for w in (f"--{name}".replace("_", "-"), str(value))
    ]
    with served(words) as server:
        seconds_of(server, 1, 4)
        alone = seconds_of(server, 1, n_tokens)
        together = seconds_of(server, n_users, n_tokens)
        joined = joining(server, n_users - 1, n_tokens)
    library = seconds_of_library(options, n_tokens)
    found = {
        "alone_tokens_per_second": n_tokens / alone,
        "together_tokens_per_second": n_users * n_tokens / together,
        "together_over_alone": n_users * alone / together,
        "library_tokens_per_second": n_tokens / library,
        "server_overhead_share": alone / library - 1.0,
        **joined,
    }
    for name, value in found.items():
        print(f"{name:28} {value:10.3f}")
    print(json.dumps({"users": n_users, "tokens": n_tokens, **options, **found}))


if __name__ == "__main__":
    main()
